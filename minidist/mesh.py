"""DeviceMesh: give every rank coordinates, and every axis of parallelism its own groups.

Eight ranks as pp=2 x dp=2 x tp=2. Ranks are numbered row by row, so the ranks of the
innermost axis, which talk most, are neighbours and sit on the fastest wire:

             dp 0         dp 1
           tp 0 tp 1    tp 0 tp 1        tp groups  [0 1] [2 3] [4 5] [6 7]
    pp 0     0    1       2    3         dp groups  [0 2] [1 3] [4 6] [5 7]
    pp 1     4    5       6    7         pp groups  [0 4] [1 5] [2 6] [3 7]

A group holds the ranks that differ in its axis only: mesh["tp"], and mesh["dp", "cp"]
for two axes at once. Making a group is collective, so all ranks make all of them here,
in one order; a rank inside a group is its coordinate, never its number in the world.

Lesson: python -m lessons.mesh -n 4
Paper:  Narayanan et al. 2021, "Efficient large-scale language model training on GPU
        clusters using Megatron-LM"
"""
import json
import math
from itertools import combinations
from typing import NamedTuple

import numpy as np

from minidist import BadInput
from minidist.collectives import all_gather
from minidist.ranks.comm import solo


class Axis(NamedTuple):
    """What is known of an axis, whatever its size.

    talks: when its ranks talk; help: of its flag; tokens: do its ranks share out the tokens of a
    batch; stages: do they hold different parameters; inside: the axis that it is a factor of"""
    talks: str
    help: str = ""
    tokens: bool = False
    stages: bool = False
    inside: str = ""


AXES = {                                                # outermost first: what talks most is last
    "pp": Axis("at the border of two stages", "stages, each with its share of the layers "
               "(default 1)", stages=True),
    "dp": Axis("once per step: gradients", "replicas of the model (default: all ranks that are "
               "left)", tokens=True),
    "edp": Axis("once per step: gradients of experts", inside="dp"),
    "ep": Axis("in every layer of experts", "ranks, of those of --dp, that share the experts "
               "(default 1)", inside="dp"),
    "cp": Axis("in every attention", "ranks that share the tokens of every row (default 1)",
               tokens=True),
    "tp": Axis("in every layer", "ranks that share every layer (default 1)")}
ORDER = tuple(axis for axis in AXES if not AXES[axis].inside)       # their product is the world


def ordered(sizes, order=ORDER):
    """Check axis sizes, and put them into order.  {axis: size}, outermost first"""
    if sorted(order) != sorted(sizes):
        raise BadInput(f"the order {','.join(order)} must name each of the axes "
                       f"{','.join(ORDER)} once; such as --order {','.join(ORDER)}")
    for axis, size in sizes.items():
        if size < 1:
            raise BadInput(f"axis {axis} has size {size}; the smallest is 1")
    return {axis: sizes[axis] for axis in order}


def factored(sizes, ep):
    """Write dp as edp x ep, in its place; BadInput if it does not divide.  {axis: size}"""
    if sizes["dp"] % ep:
        fits = [n for n in range(1, sizes["dp"] + 1) if sizes["dp"] % n == 0]
        raise BadInput(f"{ep} ranks that share the experts do not divide the {sizes['dp']} of dp; "
                       f"use ep = {', '.join(map(str, fits))}")
    grid = {}
    for axis, size in sizes.items():
        grid |= {"edp": size // ep, "ep": ep} if axis == "dp" else {axis: size}
    return grid


def coordinates(rank, sizes):
    """Say where a rank stands.  {axis: coordinate}"""
    return dict(zip(sizes, map(int, np.unravel_index(rank, tuple(sizes.values())))))


def groups(sizes, *axes):
    """List the groups of ranks that differ in these axes only, in coordinate order."""
    grid = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
    inside = [i for i, axis in enumerate(sizes) if axis in axes]
    outside = [i for i, axis in enumerate(sizes) if axis not in axes]
    width = math.prod(sizes[axis] for axis in axes)
    return grid.transpose(outside + inside).reshape(-1, width).tolist()


def require(sizes, world):
    """Refuse a mesh that does not have exactly the ranks that are running."""
    need = math.prod(sizes.values())
    if need == world:
        return
    shape = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    rest, left = divmod(world, need // sizes["dp"])
    remedy = f" or use dp={rest}" if rest and not left else ""
    raise BadInput(f"the mesh {shape} needs {need} ranks and {world} "
                   f"{'is' if world == 1 else 'are'} running; start {need} with -n {need}{remedy}")


class DeviceMesh:
    """All ranks of `world`, as a grid with named axes; an axis of size 1 always exists.

    mesh["tp"] -> Comm of my tp group    mesh["dp", "cp"] -> Comm of both axes together
    .sizes {axis: size}, outermost first; .grid, the same with dp as its factors edp x ep: the ranks
    of an ep group share the experts, those of an edp group hold the same ones; .coords {axis: mine}
    Collective: every rank calls, with the same sizes.  Ends with close(), or with `with`.
    """

    def __init__(self, world, dp=1, pp=1, cp=1, tp=1, ep=1, order=ORDER):
        self.sizes = ordered({"dp": dp, "pp": pp, "cp": cp, "tp": tp}, order)
        if ep < 1:
            raise BadInput(f"axis ep has size {ep}; the smallest is 1")
        require(self.sizes, world.size)
        self.world, self.grid = world, factored(self.sizes, ep)
        self.coords = coordinates(world.rank, self.grid) | coordinates(world.rank, self.sizes)
        self._groups = {}
        for count in range(1, len(self.grid) + 1):
            for axes in combinations(self.grid, count):
                self._groups[axes] = self._group(axes)

    def _group(self, axes):
        """Make my group along axes, or take the one that has the same ranks.  Collective."""
        whole = self.grid["ep"] > 1 and {"edp", "ep"} <= set(axes)      # has a name of its own: dp
        long = tuple(a for a in axes if self.grid[a] > 1 or whole and a == "edp")
        if len(axes) > 1 and len(long) < len(axes):
            return self._groups[long or axes[:1]]
        ranks = groups(self.grid, *axes)
        color = next(i for i, group in enumerate(ranks) if self.world.rank in group)
        key = ranks[color].index(self.world.rank)
        named = self._named(axes)
        group = self.world.split(color, key, name="-".join(named), axes=named)
        group.mesh = self
        return group

    def _named(self, axes):
        """Say dp for its factors, if it is all of dp."""
        if "edp" not in axes or self.grid["ep"] > 1 and "ep" not in axes:
            return axes
        return tuple("dp" if axis == "edp" else axis for axis in axes if axis != "ep")

    def factors(self, axes):
        """Spell an axis or several out on the grid, in its order.  "dp" -> ("edp", "ep")"""
        wanted = set(spelled([axes] if isinstance(axes, str) else axes))
        if unknown := wanted - self.sizes.keys() - self.grid.keys():
            raise BadInput(f"no axis {', '.join(sorted(unknown))} in a mesh of "
                           f"{', '.join(self.sizes)}")
        return tuple(axis for axis in self.grid if {axis, AXES[axis].inside} & wanted)

    def __getitem__(self, axes):
        """Look up my group along one axis or several, in any order."""
        return self._groups[self.factors(axes)]

    def close(self):
        """Give back all groups.  Collective; a second call does nothing."""
        for group in reversed(list(dict.fromkeys(self._groups.values()))):
            group.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        if kind is None:                                # else the others may never come to close
            self.close()

    def describe(self):
        """Say how many ranks lie how.  -> '4 ranks: dp=2 x tp=2', '1 rank'"""
        long = [f"{axis}={size}" for axis, size in self.sizes.items() if size > 1]
        return f"{self.world.size} ranks: {' x '.join(long)}" if long else "1 rank"

    def __repr__(self):
        sizes = dict(self.sizes, ep=self.grid["ep"]) if self.grid["ep"] > 1 else self.sizes
        return f"DeviceMesh({', '.join(f'{axis}={size}' for axis, size in sizes.items())})"


# ------------------------------------------------------------------- the model and its mesh

def axes_of(comm):
    """Name the mesh axes that a group lies along.

    A group that is none of a mesh stands for itself, under a name that no mesh knows."""
    return comm.axes or (comm.name,)


def spelled(keys):
    """List the axes in keys, each an axis or a tuple of axes."""
    return [axis for key in keys for axis in ((key,) if isinstance(key, str) else key)]


def key_of(comm):
    """Name a group's axes as one key: the axis, or a tuple of several."""
    axes = axes_of(comm)
    return axes[0] if len(axes) == 1 else axes


def adopt(model, comm, tokens=False):
    """Let a model remember over which axes, and on which mesh, it is spread.

    tokens: do the ranks share out the tokens?  BadInput then, on all ranks alike, if one of its
    modules looks at all tokens of a batch together."""
    for module in model.modules() if tokens and comm.size > 1 else ():
        if getattr(module, "all_tokens", False):
            raise BadInput(f"a router of experts has to count the tokens of all {comm.size} ranks: "
                           'use ep.parallelize(model, mesh["ep"]) before what shares out tokens')
    mesh, known = getattr(comm, "mesh", None), getattr(model, "mesh", None)
    if mesh is not known and mesh is not None and known is not None:
        raise ValueError(f"the model lies on {known} already; {axes_of(comm)[0]} is an axis of "
                         f"another {mesh}: take all groups from one mesh")
    model.mesh = mesh or known
    if comm.size > 1:
        model.axes = getattr(model, "axes", set()) | set(axes_of(comm))


def mesh_of(model, mesh=None):
    """Find the mesh of a model; ValueError if `mesh` is not the one over which it is spread."""
    known, axes = getattr(model, "mesh", None), getattr(model, "axes", set())
    mesh = mesh or known or DeviceMesh(solo())
    if known is not None and (known.sizes, known.grid) != (mesh.sizes, mesh.grid):
        raise ValueError(f"the model is spread over {known}, not over {mesh}")
    if unknown := sorted(axes - mesh.sizes.keys() - mesh.grid.keys()):
        raise ValueError(f"the model is spread over {', '.join(unknown)}, which is no axis of "
                         f"{mesh}; give the strategy a group of it, such as mesh['dp']")
    return mesh


def notes(mine, comm):
    """Let every rank read what the others say, as JSON.  Collective  -> one from each rank"""
    text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
    lengths = all_gather(np.array([text.size]), comm).tolist()
    texts = np.split(all_gather(text, comm, sizes=lengths), np.cumsum(lengths)[:-1])
    return [json.loads(text.tobytes()) for text in texts]


# ------------------------------------------------------------------------------ the picture


def picture(sizes):
    """Draw who is where, and who is in which group.  -> lines"""
    shown = [axis for axis in sizes if sizes[axis] > 1] or ["dp"]
    return grid_lines(sizes, shown) + [""] + group_lines(sizes, shown)


def grid_lines(sizes, shown):
    """Draw the ranks: the two innermost axes from left to right, the others downwards."""
    *rows, outer, inner = [None] * (2 - len(shown)) + shown
    wide, deep = sizes.get(outer, 1), sizes[inner]
    cell = max(len(f"{inner} {deep - 1}"), 4) + 1
    labels = [" ".join(f"{axis} {at[axis]}" for axis in rows) for at in every(sizes, rows)]
    margin = " " * max(map(len, labels))
    heads = [f"{outer} {i}".center(cell * deep) for i in range(wide)] if outer else []
    names = "".join(f"{inner} {i}".rjust(cell) for i in range(deep))
    numbers = np.array(groups(sizes, *shown)[0]).reshape(-1, wide, deep)
    lines = [margin + "  " + "   ".join(heads)] if heads else []
    lines.append(margin + "  " + "   ".join([names] * wide))
    for label, row in zip(labels, numbers):
        ranks = ("".join(f"{rank:{cell}d}" for rank in part) for part in row)
        lines.append(label.ljust(len(margin)) + "  " + "   ".join(ranks))
    return ["  " + line.rstrip() for line in lines]


def every(sizes, axes):
    """List all coordinates along axes, in order."""
    some = {axis: sizes[axis] for axis in axes}
    return [coordinates(i, some) if some else {} for i in range(math.prod(some.values()))]


def group_lines(sizes, shown):
    """Name the groups of every axis, the chattiest axis first."""
    lines = ["  axis  size  groups"]
    for axis in reversed(shown):
        found = " ".join("[" + " ".join(map(str, g)) + "]" for g in groups(sizes, axis))
        found = found if len(found) <= 50 else found[:found.rindex("[", 0, 47)] + "..."
        lines.append(f"  {axis:4}  {sizes[axis]:4}  {found:50}  talks {AXES[axis].talks}")
    return lines


def main():
    """Run the command.  What it needs is imported here: a mesh needs no launcher."""
    from minidist import flags
    from minidist.ranks import environment
    parser = flags.Parser(
        prog="python -m minidist.mesh", description="Draw a mesh; no ranks are needed.",
        epilog="example: python -m minidist.mesh --dp 2 --pp 2 --tp 2")
    for axis in (*ORDER, "ep"):
        parser.add_argument(f"--{axis}", type=flags.integer(1), default=1, metavar="N",
                            help=AXES[axis].help.split(" (")[0])
    parser.add_argument("--order", default=",".join(ORDER), metavar="A,B,C,D",
                        help="outermost axis first (default %(default)s)")
    args = parser.parse_args()
    sizes = ordered({axis: getattr(args, axis) for axis in ORDER}, args.order.split(","))
    shape = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    if environment.rank() == 0:
        print(f"DeviceMesh {shape}: {math.prod(sizes.values())} ranks, outermost axis first\n")
        print("\n".join(picture(factored(sizes, args.ep) if args.ep > 1 else sizes)))


if __name__ == "__main__":
    from minidist.ranks import launch
    launch.run(main)
