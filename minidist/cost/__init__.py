"""Closed forms: what every technique sends, holds and waits for, before it runs.

    messages      a collective over p ranks           cost.all_reduce("ring", p, n, itemsize, rank)
    model         one training step in one process    cost.gpt_flops(Sizes(...))
    shards        ZeRO: what its stages send, hold    cost.zero(...), cost.zero_memory(7.5e9, 64, 2)
                  what lies elsewhere, and moves      cost.offload(numbers, w)
    experts       rows that go to their experts       cost.ep(there, back, held, sizes, group)
    strategies    what each strategy adds and saves   cost.tp(Sizes(...), Group(p, rank))
    compression   a bucket that is summed about       cost.compressed("1bit", shapes, group, w)
    layout        all of a layout together            cost.step(Sizes(...), Layout(dp=2, tp=4))

Bytes are bytes *sent* by one rank.  Imports no array, and knows no rank but its number.
"""
from minidist.cost.compression import compressed, kept, low_rank                 # noqa: F401
from minidist.cost.experts import ep                                             # noqa: F401
from minidist.cost.layout import Layout, step                                   # noqa: F401
from minidist.cost.messages import (                                             # noqa: F401
    Group, Price, all_gather, all_reduce, all_to_all, broadcast, chunks, double_tree, gather,
    hierarchical, reduce, reduce_scatter, scatter, seconds)
from minidist.cost.model import (                                                # noqa: F401
    GPT3, Kept, Sizes, Work, active_parameters, at_least, attention_work, block_activations,
    gpt_activations, gpt_flops, gpt_parameters, linear_work, recomputed_activations,
    recomputed_flops, selective_activations, state_bytes, textbook_activations, tiles)
from minidist.cost.shards import (                                               # noqa: F401
    Moved, offload, zero, zero_held, zero_memory, zero_parts)
from minidist.cost.strategies import (                                           # noqa: F401
    between_cuts, cp, ddp, dp, pp, sp, tp, tp_activations, tp_block_activations, tp_keys,
    tp_parameters, tp_shapes, ulysses)
