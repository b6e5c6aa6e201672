"""What ZeRO sends and holds, stage by stage; what moves if some of it lies elsewhere.

    group p, model of n numbers        parameters   gradients   optimizer    sent, (p-1)/p n each
    stage 1                            n            n           n/p          2
    stage 2, m micro-batches           n            n/p         n/p          m + 1
    stage 3, m micro-batches           n/p          n/p         n/p          3 m

Each parameter is padded until p pieces of it are equal, so exact numbers are a little larger.

Lesson: mpirun -n 4 python -m lessons.zero
"""
from typing import NamedTuple

from minidist.cost.messages import NOTHING


def pieces(parameters, p):
    """Count the numbers in one piece of each of these parameters, padding included."""
    return sum(-(-n // p) for n in parameters)


def zero(sums, group, w, stage, microbatches=1, gathers=None):
    """Price of one step of ZeRO.

    sums: the numbers in each parameter, in a list for each bucket (stage 3: each part of the
    model).  gathers: the same for what is gathered, where parts gather more than they sum, such as
    a tied or frozen parameter."""
    p = group.p
    there = sum((group.reduce_scatter([pieces(one, p) + len(one)] * p, w) for one in sums), NOTHING)
    back = sum((group.all_gather([pieces(one, p)] * p, w)
                for one in (sums if gathers is None else gathers)), NOTHING)
    if stage == 1:
        return there + back
    return microbatches * there + (back if stage == 2 else 2 * microbatches * back)


def zero_parts(parameters, layers, tied):
    """Deal a GPT's parameters, in the order of the forward pass, to its parts.

    -> (what each part sums, last part first, what each part gathers): a tied table is summed by
    the embedding and gathered by the head as well"""
    head = len(parameters) - (2 if tied else 3)
    each = (head - 2) // layers
    blocks = [parameters[2 + i * each:2 + (i + 1) * each] for i in range(layers)]
    parts = [parameters[:2], *blocks, parameters[head:]]
    return parts[::-1], [*parts[:-1], parts[-1] + parameters[:1] * tied]


def zero_held(parameters, group, stage, state=2):
    """Count numbers that a rank holds between steps: parameters, gradients, optimizer state.

    Stages 1 and 2 pad gradients only; stage 3 pads all, since a piece is all there is."""
    piece, p = pieces(parameters, group.p), group.p
    mine = sum(max(0, min(n - group.rank * -(-n // p), -(-n // p))) for n in parameters)
    whole = sum(parameters)
    return (whole if stage < 3 else piece, p * piece if stage == 1 else piece,
            state * (mine if stage < 3 else piece))


def zero_memory(parameters, p, stage, state=12, w=2):
    """Count the bytes per rank as the ZeRO paper does: mixed precision, no padding.

    w: bytes of a parameter, and of a gradient; state: of the optimizer (a float32 copy, two
    moments).  7.5e9 parameters over 64 ranks: 120e9 (stage 0), 31.4e9, 16.6e9, 1.88e9"""
    share = [1 / p if stage >= first else 1 for first in (3, 2, 1)]
    return parameters * sum(part * bytes_ for part, bytes_ in zip(share, (w, w, state)))


class Moved(NamedTuple):
    """Bytes of one rank: what lies elsewhere, what a step reads and writes there, two chunks."""
    elsewhere: int
    read: int
    written: int
    buffers: int


def offload(numbers, w, state=2, chunk=1 << 20, gathered=None):
    """Say what lies elsewhere and moves, if a rank's optimizer updates so many numbers.  -> Moved

    All of it is read once and written once in a step.  gathered: ZeRO's stage 3, whose parameters
    lie there too: how many numbers of its own a rank reads in a step to gather them (2 m times)."""
    slots = state + (gathered is not None)
    there, row = slots * numbers * w, -(-min(chunk, numbers * w) // 64) * 64
    return Moved(there, there + (gathered or 0) * w, there, 2 * slots * row)
