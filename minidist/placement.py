"""Placement: how each parameter lies on the mesh, and the one rule that finishes its gradient.

A parameter names the axes along which it is cut, in the order of cutting; along every other
axis of the mesh it is replicated, that is whole and bitwise the same on all ranks:

    Shard(dim, parts)   rank r of the axis holds the indices parts[r] along dim
    Flat(shape)         flattened, padded, cut into equal pieces, whatever the shape
    Held(stages)        whole on these coordinates of the axis only, absent on the others

(`sliced` says the same of an optimizer's state and finished gradient alone: ZeRO-1 and 2),
and the axes over which its gradient is still `partial` when backward returns, because each
rank has seen some of the tokens (dp, cp) or some of the sequence (tp, under sp).

    The gradient rule.   A gradient is summed over exactly the axes over which it is partial,
                         then divided once, by the target tokens of the whole global batch.

A strategy completes an axis itself during backward or names it partial, never both. What
needs to know where things lie asks here: cutting, gathering, finishing, norms, comparing.

Price: one all_reduce per partial parameter, and one of 4 bytes per parameter to agree on
which were used at all. See cost.finalize_bytes.

Lesson: mpirun -n 4 python -m lessons.dp
"""
import math
from dataclasses import dataclass, field

import numpy as np

from minidist.collectives import all_gather, all_reduce, reduce_scatter
from minidist.engine.optim import square_sum


@dataclass(frozen=True, eq=False)
class Shard:
    """parts[r]: the indices along dim that rank r of comm holds; disjoint, together all."""
    dim: int
    parts: list
    comm: object = field(repr=False)

    def cut(self, x):
        """Keep my indices.  [n, ...] -> [n_r, ...]"""
        return np.ascontiguousarray(np.take(x, self.parts[self.comm.rank], self.dim))

    def join(self, x):
        """Put the pieces of all ranks back in their places.  [n_r, ...] -> [n, ...]"""
        together = all_gather(x, self.comm, self.dim, sizes=[len(part) for part in self.parts])
        return np.take(together, np.argsort(np.concatenate(self.parts)), self.dim)

    def __str__(self):
        return f"dim {self.dim}"

    def same(self, other):
        return (isinstance(other, Shard) and self.dim == other.dim
                and all(map(np.array_equal, self.parts, other.parts)))


@dataclass(frozen=True, eq=False)
class Flat:
    """An array of this shape, flattened and padded with zeros to comm.size equal pieces."""
    shape: tuple
    comm: object = field(repr=False)

    @property
    def size(self):
        """Number of elements in one piece, padding included."""
        return -(-math.prod(self.shape) // self.comm.size)

    def pad(self, x):
        """Lay x out for the ranks, one row each.  shape -> [p, size]"""
        rows = np.zeros((self.comm.size, self.size), x.dtype)
        rows.reshape(-1)[:x.size] = x.reshape(-1)
        return rows

    def cut(self, x):
        """Keep my piece.  shape -> [size]"""
        return self.pad(x)[self.comm.rank].copy()

    def join(self, x):
        """Gather all pieces and drop the padding.  [size] -> shape"""
        return all_gather(x, self.comm)[:math.prod(self.shape)].reshape(self.shape)

    def __str__(self):
        return "flattened"

    def same(self, other):
        return isinstance(other, Flat) and self.shape == other.shape


@dataclass(frozen=True, eq=False)
class Held:
    """Whole on the given coordinates of the axis, absent elsewhere; comm joins the holders."""
    stages: tuple
    comm: object = field(repr=False)

    def cut(self, x):
        return x

    def join(self, x):
        return x

    def __str__(self):
        return f"on {', '.join(map(str, self.stages))} only"

    def same(self, other):
        return isinstance(other, Held) and tuple(self.stages) == tuple(other.stages)


def cut(p, axis, placement):
    """Cut a parameter in place: the object and its name survive, so ties and hooks do too.

    A tied parameter is met once per place; the second time nothing is left to do."""
    if axis in p.placements:
        if not placement.same(p.placements[axis]):
            raise ValueError(f"{p.name} is cut over {axis} already, in another way")
        return
    flat = [a for a, placed in p.placements.items() if isinstance(placed, Flat)]
    if flat and isinstance(placement, Shard):
        raise ValueError(f"{p.name} is flat over {flat[0]}: it has no dimension {placement.dim} "
                         f"left to cut over {axis}; cut it over {axis} first")
    p.placements[axis] = placement
    p.data = placement.cut(p.data)


def join(p, x, sliced=False):
    """Gather the global value of x, which lies as p does; sliced: as p's finished gradient.

    Collective over every axis along which p is cut; the result is the same on all its ranks."""
    lies = list(p.placements.values()) + (list(p.sliced.values()) if sliced else [])
    for placed in reversed(lies):
        x = placed.join(x)
    return x


# ------------------------------------------------------------------------ the gradient rule

def finalize(params, mesh, count):
    """Finish every gradient: sum it over its partial axes, divide it by count, once.

    A parameter without a gradient on some ranks adds zero there; without one on any rank it
    keeps None, so that momentum and decay leave it alone.  Collective: every rank calls."""
    for comm, members in open_sums(params, mesh):
        used = agree([p.grad is not None for p in members], comm)
        for p, anywhere in zip(members, used):
            if anywhere:
                p.grad = add_up(p, comm)
    for p in params:
        if p.grad is not None:
            p.grad /= count


def open_sums(params, mesh):
    """List the sums still to be taken: (Comm, its parameters), in one order on all ranks.

    Axes along which a parameter is neither cut nor sliced are summed in one go."""
    found = {}
    for p in params:
        lies = {**p.placements, **p.sliced}
        whole = tuple(axis for axis in mesh.sizes if axis in p.partial - lies.keys())
        if whole and mesh[whole].size > 1:
            found.setdefault((0, whole), (mesh[whole], []))[1].append(p)
        for axis in p.partial & lies.keys():
            key = 1, (axis, *getattr(lies[axis], "stages", ()))
            found.setdefault(key, (lies[axis].comm, []))[1].append(p)
    return [found[key] for key in sorted(found)]


def agree(flags, comm):
    """Say which flags are up on at least one rank.  Collective."""
    return all_reduce(np.array(flags, np.int32), comm, op="max").astype(bool)


def add_up(p, comm):
    """Sum p's gradient over comm, where it counts as zero if there is none.  -> all or my piece"""
    grad = np.zeros_like(p.data) if p.grad is None else p.grad
    for flat in p.sliced.values():
        if flat.comm is comm:
            return reduce_scatter(flat.pad(grad), comm)[0]
    return all_reduce(grad, comm)


# ---------------------------------------------------------------- what reads the placements

def owns(p, mesh):
    """Say yes on exactly one rank for each element of p: whoever counts it counts it once."""
    for axis, here in mesh.coords.items():
        placed = p.sliced.get(axis) or p.placements.get(axis)
        first = placed.stages[0] if isinstance(placed, Held) else 0
        if here != first and not isinstance(placed, (Shard, Flat)):
            return False
    return True


def grad_norm(params, mesh):
    """Take the norm of the whole finished gradient, each element once.  The same on all ranks."""
    mine = square_sum([p for p in params if owns(p, mesh)])
    return math.sqrt(total([mine], mesh, mesh.sizes)[0])


def total(numbers, mesh, axes):
    """Sum numbers over the ranks of these axes.  -> list of floats"""
    return all_reduce(np.array(numbers, np.float64), mesh[tuple(axes)]).tolist()


def audit(params):
    """List how each parameter lies.  -> [(name, whole shape, my shape, "tp dim 0", ...)]

    What no axis cuts is "replicated": a layer that a strategy has forgotten is seen here."""
    return [(p.name, str(list(p.full_shape)), str(list(p.data.shape)),
             ", ".join(f"{axis} {placed}" for axis, placed in p.placements.items())
             or "replicated") for p in params]
