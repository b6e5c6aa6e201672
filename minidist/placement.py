"""Placement: how each parameter lies on the mesh, and the one rule that finishes its gradient.

A parameter names the axes along which it is cut, in the order of cutting (a tuple of axes, where
they are cut together); along every other axis of the mesh it is replicated, that is whole and
bitwise the same on all ranks:

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
which were used at all. See cost.dp.

Lesson: mpirun -n 4 python -m lessons.dp
"""
import math
from dataclasses import dataclass, field

import numpy as np

from minidist.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from minidist.engine.optim import square_sum
from minidist.mesh import AXES, axes_of, notes, spelled


@dataclass(frozen=True, eq=False)
class Shard:
    """parts[r]: the indices along dim that rank r of comm holds; disjoint, together all."""
    dim: int
    parts: list
    comm: object = field(repr=False)

    @property
    def key(self):
        return self.dim, [list(map(int, part)) for part in self.parts]

    def cut(self, x):
        """Keep my indices.  [n, ...] -> [n_r, ...]"""
        return np.ascontiguousarray(np.take(x, self.parts[self.comm.rank], self.dim))

    def join(self, x):
        """Put the pieces of all ranks back in their places.  [n_r, ...] -> [n, ...]"""
        together = all_gather(x, self.comm, self.dim, sizes=[len(part) for part in self.parts])
        return np.take(together, np.argsort(np.concatenate(self.parts)), self.dim)

    def __str__(self):
        return f"dim {self.dim}"


@dataclass(frozen=True, eq=False)
class Flat:
    """An array of this shape, flattened and padded with zeros to comm.size equal pieces."""
    shape: tuple
    comm: object = field(repr=False)

    @property
    def key(self):
        return tuple(self.shape)

    @property
    def size(self):
        """Number of elements in one piece, padding included."""
        return -(-math.prod(self.shape) // self.comm.size)

    @property
    def mine(self):
        """Where my piece lies in the flattened array, without the padding."""
        n, start = math.prod(self.shape), self.comm.rank * self.size
        return slice(min(start, n), min(start + self.size, n))

    def pad(self, x):
        """Lay x out for the ranks, one row each.  shape -> [p, size]"""
        rows = np.zeros((self.comm.size, self.size), x.dtype)
        rows.reshape(-1)[:x.size] = x.reshape(-1)
        return rows

    def cut(self, x):
        """Keep my piece.  shape -> [size]"""
        return self.pad(x)[self.comm.rank].copy()

    def join(self, x):
        """Gather all pieces and drop the padding, if they have it.  [size] -> shape"""
        if x.size < self.size:
            x = np.concatenate([x, np.zeros(self.size - x.size, x.dtype)])
        return all_gather(x, self.comm)[:math.prod(self.shape)].reshape(self.shape)

    def __str__(self):
        return "flattened"


@dataclass(frozen=True, eq=False)
class Held:
    """Whole on the given coordinates of the axis, absent elsewhere; comm joins the holders."""
    stages: tuple
    comm: object = field(repr=False)

    @property
    def key(self):
        return tuple(self.stages)

    def cut(self, x):
        return x

    def join(self, x):
        return x

    def __str__(self):
        return f"on {', '.join(map(str, self.stages))} only"


def same(a, b):
    """Do two placements cut alike, whatever their groups?"""
    return type(a) is type(b) and a.key == b.key


def cut(p, axis, placement):
    """Cut a parameter in place: the object and its name survive, so ties and hooks do too.

    A tied parameter is met once per place; the second time nothing is left to do."""
    if axis in p.placements:
        if not same(placement, p.placements[axis]):
            raise ValueError(f"{p.name} is cut over {axis} already, in another way")
        return
    if twice := set(spelled([axis])) & set(spelled(p.placements)):
        raise ValueError(f"{p.name} is cut over {min(twice)} already, it cannot be over {axis} too")
    flat = [a for a, placed in p.placements.items() if isinstance(placed, Flat)]
    if flat and isinstance(placement, Shard):
        raise ValueError(f"{p.name} is flat over {flat[0]}: it has no dimension {placement.dim} "
                         f"left to cut over {axis}; cut it over {axis} first")
    p.placements[axis] = placement
    p.data = placement.cut(p.data)


def lies(p, sliced):
    """List how p is cut, in order; sliced: how its optimizer state and finished gradient are."""
    return list(p.placements.values()) + (list(p.sliced.values()) if sliced else [])


def join(p, x, sliced=False):
    """Gather the global value of x, which lies as p does; sliced: as p's finished gradient.

    Collective over every axis along which p is cut; the result is the same on all its ranks."""
    for placed in reversed(lies(p, sliced)):
        x = placed.join(x)
    return x


def lay(p, x, sliced=False):
    """Keep my piece of a global value of p: the inverse of join.  No message"""
    for placed in lies(p, sliced):
        x = placed.cut(x)
    return x


# ------------------------------------------------------------------------ the gradient rule

def mark_partial(p, comm):
    """Name p's gradient partial over a group's axes, but for those along which p is cut."""
    p.partial.update(open_axes(p, comm))


def open_axes(p, comm):
    """Name the axes of a group along which p is not cut: for an expert, cut over ep, edp of dp."""
    axes, own = set(axes_of(comm)), set(spelled(p.placements))
    mesh = getattr(comm, "mesh", None)
    if mesh is not None and own & set(mesh.factors(axes)) - axes:
        axes = set(mesh.factors(axes))
    return axes - own


def alike_in(comm, p):
    """Find the ranks of a group that hold the same piece of p: all, but for an expert over dp."""
    axes = open_axes(p, comm)
    return comm if axes == set(axes_of(comm)) else comm.mesh[axes]


def finalize(params, mesh, count):
    """Finish every gradient: sum it over its partial axes, divide it by count, once.

    A parameter without a gradient on some ranks adds zero there; without one on any rank it
    keeps None, so that momentum and decay leave it alone.  Collective: every rank calls."""
    refuse_impossible(params, mesh)
    for comm, members in [*whole_sums(params, mesh), *piece_sums(params)]:
        used = agree([p.grad is not None for p in members], comm)
        for p, anywhere in zip(members, used):
            if anywhere:
                p.grad = add_up(p, comm)
    for p in params:
        if p.grad is not None:
            p.grad /= count


def refuse_impossible(params, mesh):
    """Raise ValueError for a sum over an axis that the mesh lacks, or over pieces."""
    for p in params:
        if unknown := p.partial - mesh.sizes.keys() - mesh.grid.keys():
            raise ValueError(f"the gradient of {p.name} is partial over "
                             f"{', '.join(sorted(unknown))}, which is no axis of {mesh}; give the "
                             "strategy a group of the mesh, such as mesh['dp']")
        for key, placed in p.placements.items() if p.partial else ():
            both = {*mesh.factors(p.partial)} & {*mesh.factors([key])}
            if both and not isinstance(placed, Held):
                raise ValueError(f"the gradient of {p.name} cannot be partial over "
                                 f"{', '.join(sorted(both))}: each rank holds another piece of it "
                                 f"({placed})")


def whole_sums(params, mesh):
    """List the sums of gradients of which all ranks hold the same piece: (Comm, parameters).

    The axes along which a parameter is neither cut nor sliced are summed in one go."""
    found = {}
    for p in params:
        axes = mesh.factors(p.partial.difference(spelled([*p.placements, *p.sliced])))
        if axes and mesh[axes].size > 1:
            found.setdefault(axes, (mesh[axes], []))[1].append(p)
    return [found[axes] for axes in sorted(found)]


def piece_sums(params):
    """List the sums that leave each rank its piece, then those over the holders of a parameter.

    In one order on all ranks: by axis, then by who holds it.  -> (Comm, parameters)"""
    found = {}
    for p in params:
        for late, where in enumerate((p.sliced, p.placements)):
            for key, placed in where.items():
                axes = spelled([key])
                if p.partial.issuperset(axes):
                    place = late, axes, placed.key if late else ()
                    found.setdefault(str(place), (placed.comm, []))[1].append(p)
    return [found[place] for place in sorted(found)]


def agree(flags, comm):
    """Say which flags are up on at least one rank.  Collective."""
    return all_reduce(np.array(flags, np.int32), comm, op="max").astype(bool)


def add_up(p, comm):
    """Sum p's gradient over comm, where it counts as zero if there is none.  -> all or my piece"""
    for key, flat in p.sliced.items():
        if flat.comm is comm and p.partial.issuperset(spelled([key])):
            whole = np.zeros_like(p.data) if p.grad is None else p.grad
            return reduce_scatter(flat.pad(whole), comm)[0]
    return all_reduce(no_gradient(p, comm) if p.grad is None else p.grad, comm)


def no_gradient(p, comm):
    """Make zeros like the gradient that others have: of my piece, where it has been cut already.

    Pieces are made before the sum over holders, or by the strategy itself."""
    late = any(placed.comm is comm for placed in p.placements.values())
    for key, flat in p.sliced.items():
        if late or not p.partial.issuperset(spelled([key])):
            return np.zeros(flat.size, p.dtype)
    return np.zeros_like(p.data)


# ---------------------------------------------------------------- what reads the placements

def owns(p, mesh):
    """Say yes on exactly one rank for each element of p: whoever counts it counts it once."""
    cut_over = set()
    for key, placed in {**p.placements, **p.sliced}.items():
        cut_over.update(mesh.factors([key]))
        if isinstance(placed, Held) and mesh.coords[key] != placed.stages[0]:
            return False
    return all(mesh.coords[axis] == 0 for axis in mesh.grid if axis not in cut_over)


def grad_norm(params, mesh):
    """Take the norm of the whole finished gradient, each element once.  The same on all ranks."""
    mine = square_sum([p for p in params if owns(p, mesh)])
    return math.sqrt(total([mine], mesh, mesh.sizes)[0])


def total(numbers, mesh, axes):
    """Sum numbers over the ranks of these axes.  -> list of floats"""
    return all_reduce(np.array(numbers, np.float64), mesh[tuple(axes)]).tolist()


def everything(params, mesh):
    """Gather all parameters of the model, whatever holds them.  Collective  -> {name: whole}"""
    return merge({p.name: join(p, p.data) for p in params}, mesh)


def merge(arrays, mesh):
    """Give every rank what only some stages have: {name: array} of each -> {name: array} of all.

    Where several stages hold a name, the first one's array counts.  Collective"""
    comm, found = mesh[[axis for axis in AXES if AXES[axis].stages]], {}
    if comm.size == 1:
        return {name: x.copy() for name, x in arrays.items()}
    mine = [[name, x.dtype.str, x.shape] for name, x in arrays.items()]
    for stage, held in enumerate(notes(mine, comm)):
        for name, dtype, shape in held:
            if name not in found:
                own = arrays[name] if stage == comm.rank else np.empty(shape, dtype)
                found[name] = broadcast(own, comm, root=stage)
    return found


def audit(params):
    """List how each parameter lies.  -> [(name, whole shape, my shape, "tp dim 0", ...)]

    What no axis cuts is "replicated": a layer that a strategy has forgotten is seen here."""
    return [(p.name, str(list(p.full_shape)), str(list(p.data.shape)), ", ".join(
             f"{'-'.join(spelled([axis]))} {placed}" for axis, placed in p.placements.items())
             or "replicated") for p in params]
