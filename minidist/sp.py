"""Sequence parallelism: what tensor parallelism leaves whole, cut along the tokens.

Norms, dropout and the residual stream look at one token at a time, yet under tensor parallelism
every rank does, and remembers, all of them.  An all_reduce is a reduce_scatter followed by an
all_gather, and the stretch between the two may as well run on T/p tokens:

    tp    x [B,T,D]  --f--> attn or mlp --g--> [B,T,D]    norm, dropout, + on all T tokens
    sp    x [B,T/p,D] -AG-> attn or mlp -RS-> [B,T/p,D]   norm, dropout, + on my T/p tokens

        enter = all_gather       backward: reduce_scatter
        leave = reduce_scatter   backward: all_gather

Price: the same bytes as tensor parallelism, if the gathered input of each matrix is kept for its
weight's gradient (8 units of B T D (p-1)/p per layer); usually only the piece is kept and gathered
a second time (10 units), since memory is what this is for.  See cost.sp.
Gain: everything that the layer keeps for backward / p, not only what lies inside the cut matrices.
Trap: a norm's parameters now see only T/p tokens, so their gradients are partial over the group.

Lesson: mpirun -n 4 python -m lessons.sp
Paper:  Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models"
"""
import functools


from minidist import BadInput, collectives
from minidist.engine import functional
from minidist.engine.dtypes import product, summed
from minidist.engine.tensor import Tensor, no_grad
from minidist.mappings import all_gather, reduce_scatter
from minidist.mesh import adopt
from minidist.placement import mark_partial

TOKENS = 1                                                     # the dimension of T in [B, T, D]


def enter(x, comm):
    """Gather the tokens before a cut matrix.  [B, T/p, D] -> [B, T, D]"""
    return all_gather(x, comm, TOKENS)


def leave(x, comm):
    """Sum over ranks behind a cut matrix, and keep my tokens.  [B, T, D] -> [B, T/p, D]"""
    return reduce_scatter(x, comm, TOKENS)


def parallelize(model, comm, keep_input=False):
    """Let a model that tp.parallelize(model, comm, enter, leave) has cut carry T/p tokens.

    keep_input: keep the gathered input of each column-parallel layer, rather than gather it again
    in backward.  Raises BadInput, on all ranks alike, when T does not divide."""
    entries = [module for module in model.modules() if getattr(module, "enter", None) is enter]
    if not entries:
        raise ValueError("sequence parallelism needs its pair inside the layers: "
                         "tp.parallelize(model, comm, sp.enter, sp.leave) comes first")
    refuse_uneven_tokens(model.config.context, comm.size)
    adopt(model, comm)
    model.localizers.append(functools.partial(narrow_stream, comm=comm))
    for layer in entries:
        if not keep_input:
            layer.wrap(functools.partial(gather_again, layer))
    for p in model.parameters():
        mark_partial(p, comm)
    return model


def refuse_uneven_tokens(T, p, cp=1):
    """Raise BadInput unless each of p ranks can have as many tokens as the others; beside cp."""
    runs = p * cp
    if T % runs:
        ranks = f"{p} ranks" if cp == 1 else f"{cp} ranks of --cp times {p} of --tp"
        raise BadInput(f"{T} tokens do not split over {ranks}; use a context of "
                       f"{max(T // runs, 1) * runs} or {(max(T // runs, 1) + 1) * runs}, "
                       "or no --sp")


def narrow_stream(batch, comm):
    """Narrow the residual stream to my tokens; attention and loss still see them all."""
    refuse_uneven_tokens(len(batch.stream), comm.size)
    return batch.take_stream(comm.rank, comm.size)


def gather_again(layer, _, x):
    """Stand in for a column-parallel layer's forward."""
    return all_gather_linear(x, layer.weight, layer.bias, layer.comm)


def all_gather_linear(x, w, b, comm):
    """Do linear(all_gather(x), w, b), but remember only my piece of x.  [B, T/p, D] -> [B, T, F]

    Backward gathers x a second time, for the gradient of w."""
    with no_grad():
        y = functional.linear(all_gather(x, comm, TOKENS), w, b)
    mine = x.data

    def vjp(g):
        rows = g.reshape(-1, g.shape[-1])

        def of_weight():
            x_full = collectives.all_gather(mine, comm, TOKENS)
            return product(rows.T, x_full.reshape(-1, x_full.shape[-1]))

        of_x = collectives.reduce_scatter(product(g, w.data), comm, TOKENS)
        return (of_x, of_weight) if b is None else (of_x, of_weight, lambda: summed(rows, 0))

    return Tensor(y.data, (x, w) if b is None else (x, w, b), vjp)
