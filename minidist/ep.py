"""Expert parallelism: the experts of a layer over several ranks, tokens go to where theirs is.

                 rank 0: experts 0 1         rank 1: experts 2 3
    my rows      [ e0 | e1 | e2 | e3 ]       [ e0 | e1 | e2 | e3 ]     sorted by expert
                       \\______________  ______________/
    dispatch     [ e0 e1 | e0 e1 ]     \\/    [ e2 e3 | e2 e3 ]         all_to_all, uneven
    experts      [ e0 e0 | e1 e1 ]           [ e2 e2 | e3 e3 ]         sorted again, and computed
    combine      [ e0 | e1 | e2 | e3 ]       [ e0 | e1 | e2 | e3 ]     all_to_all, the way back

The ranks are some of those that share the rows of a batch: dp = edp x ep.  How many rows go where
is the router's choice, so the counts travel first.  No row for an expert, or for a whole rank, is
normal: all ranks still take part in each exchange, forward and backward.

An expert has seen the tokens of all ranks of ep when backward returns: its gradient is whole along
ep, and partial along edp only.  Nothing is scaled: see placement.finalize.

Price per layer and step: four all_to_alls, of about (p-1)/p k n D numbers each for my n tokens, and
E counts.  See cost.ep.  Gain: experts, their gradients and their optimizer state / p.

Lesson: mpirun -n 4 python -m lessons.ep
Paper:  Lepikhin et al. 2020, "GShard: scaling giant models with conditional computation and
        automatic sharding"
"""
from functools import partial

import numpy as np

from minidist import BadInput, collectives
from minidist.engine.tensor import Tensor
from minidist.mappings import all_to_all
from minidist.mesh import AXES, adopt, key_of
from minidist.moe import mixtures
from minidist.placement import Shard, cut

SHARING = [axis for axis in AXES if AXES[axis].tokens]


def parallelize(model, comm):
    """Share out the experts of every layer over comm, and count the tokens of all ranks.

    Comes before the strategies that share out tokens.  Collective.  Raises BadInput, on all ranks
    alike, for fewer experts than ranks, and for a model without any."""
    layers = mixtures(model)
    refuse_idle_ranks([layer.routing.experts for layer in layers], comm.size)
    adopt(model, comm)
    for layer in layers:
        layer.total = partial(total, comm=sharers(comm))
        layer.all_tokens = False
        share(layer.experts, comm)
    return model


def refuse_idle_ranks(experts, p):
    """Raise BadInput unless each rank has an expert."""
    if not experts:
        raise BadInput("this model has no experts to share out; use --experts E, or no --ep")
    if min(experts) < p:
        raise BadInput(f"{p} ranks do not get one each of {min(experts)} experts; use --ep "
                       f"{min(experts)} or fewer")


def sharers(comm):
    """Find the group that shares out the tokens of a batch: dp and cp of a mesh, or comm itself."""
    mesh = getattr(comm, "mesh", None)
    return comm if mesh is None else mesh[tuple(SHARING)]


def total(counts, comm):
    """Add up how many tokens of each rank chose each expert.  [E] -> [E]"""
    return collectives.all_reduce(counts, comm) if comm.size > 1 else counts


def share(experts, comm):
    """Keep my experts, a run of them, and let rows travel to theirs and back."""
    parts = np.array_split(np.arange(len(experts.fc1.data)), comm.size)
    for p in experts.parameters():
        cut(p, key_of(comm), Shard(0, parts, comm))
    if comm.size > 1:
        experts.wrap(partial(travel, comm=comm, held=[len(part) for part in parts]))


def travel(forward, rows, counts, comm, held):
    """Run my experts on the rows of all ranks.  [m, D], [E] -> [m, D]; held: experts of each rank

    rows: in the order of their experts.  Collective: every rank calls, and calls backward."""
    came = exchange_counts(counts, comm, held)
    y = forward(*dispatch(rows, counts, came, comm, held))
    return combine(y, counts, came, comm, held)


def exchange_counts(counts, comm, held):
    """Tell each rank how many rows it gets for each of its experts.  [E] -> [p, my experts]"""
    mine = held[comm.rank]
    with comm.label("counts"):
        came = collectives.all_to_all(runs(counts, held), comm, [(mine,)] * len(held))
    return np.array(came, int).reshape(comm.size, mine)


def runs(counts, held):
    """Cut counts by the ranks that hold the experts.  [E] -> list of p arrays"""
    return np.split(counts, np.cumsum(held)[:-1])


def sums(counts, held):
    """Count the rows that go to each rank.  [E] -> list of p"""
    return [int(run.sum()) for run in runs(counts, held)]


def by_expert(came):
    """Order rows that come by rank, then by expert, by expert, then by rank.  [p, E/p] -> [m]"""
    expert = np.repeat(np.tile(np.arange(came.shape[1]), len(came)), came.reshape(-1))
    return np.argsort(expert, kind="stable")


def dispatch(rows, counts, came, comm, held):
    """Send rows to the ranks of their experts.  [m, D] -> rows for my experts, their counts

    counts [E]: of my rows; came [p, E/p]: from each rank, for each of my experts."""
    rows = all_to_all(rows, comm, 0, 0, sums(counts, held), came.sum(1).tolist())
    return permuted(rows, by_expert(came)), came.sum(0)


def combine(y, counts, came, comm, held):
    """Send what my experts made of rows back to where each came from: dispatch backwards."""
    y = permuted(y, np.argsort(by_expert(came)))
    return all_to_all(y, comm, 0, 0, came.sum(1).tolist(), sums(counts, held))


def permuted(x, order):
    """Put rows into another order.  [m, D] -> [m, D]"""
    back = np.argsort(order)
    return Tensor(x.data[order], (x,), lambda g: (g[back],))
