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
import math
from itertools import combinations

import numpy as np

from minidist import BadInput

ORDER = ("pp", "dp", "cp", "tp")                        # outermost first
TALKS = {"pp": "at the border of two stages", "dp": "once per step: gradients",
         "cp": "in every attention", "tp": "in every layer"}


def ordered(sizes, order=ORDER):
    """Check axis sizes, and put them into order.  {axis: size}, outermost first"""
    if sorted(order) != sorted(sizes):
        raise BadInput(f"the order {','.join(order)} must name each of the axes "
                       f"{','.join(ORDER)} once; such as --order {','.join(ORDER)}")
    for axis, size in sizes.items():
        if size < 1:
            raise BadInput(f"axis {axis} has size {size}; the smallest is 1")
    return {axis: sizes[axis] for axis in order}


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
    .sizes {axis: size} and .coords {axis: mine}, outermost first; .world
    Collective: every rank calls, with the same sizes.
    """

    def __init__(self, world, dp=1, pp=1, cp=1, tp=1, order=ORDER):
        self.sizes = ordered({"dp": dp, "pp": pp, "cp": cp, "tp": tp}, order)
        require(self.sizes, world.size)
        self.world = world
        self.coords = coordinates(world.rank, self.sizes)
        self._groups = {}
        for count in range(1, len(order) + 1):
            for axes in combinations(self.sizes, count):
                self._groups[axes] = self._group(axes)

    def _group(self, axes):
        """Make my group along axes, or take the one that has the same ranks.  Collective."""
        long = tuple(axis for axis in axes if self.sizes[axis] > 1)
        if len(axes) > 1 and len(long) < len(axes):
            return self._groups[long or axes[:1]]
        ranks = groups(self.sizes, *axes)
        color = next(i for i, group in enumerate(ranks) if self.world.rank in group)
        key = ranks[color].index(self.world.rank)
        return self.world.split(color, key, name="-".join(axes))

    def __getitem__(self, axes):
        """Look up my group along one axis or several, in any order."""
        wanted = (axes,) if isinstance(axes, str) else tuple(axes)
        if unknown := set(wanted) - set(self.sizes):
            raise BadInput(f"no axis {', '.join(sorted(unknown))} in a mesh of "
                           f"{', '.join(self.sizes)}")
        return self._groups[tuple(axis for axis in self.sizes if axis in wanted)]

    def describe(self):
        """Say how many ranks lie how.  -> '4 ranks: dp=2 x tp=2', '1 rank'"""
        long = [f"{axis}={size}" for axis, size in self.sizes.items() if size > 1]
        return f"{self.world.size} ranks: {' x '.join(long)}" if long else "1 rank"

    def __repr__(self):
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        return f"DeviceMesh({sizes})"


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
        lines.append(f"  {axis:4}  {sizes[axis]:4}  {found:50}  talks {TALKS[axis]}")
    return lines


def main():
    """The command.  What it needs is imported here: a mesh needs no launcher."""
    from minidist import flags
    from minidist.ranks import environment
    parser = flags.Parser(
        prog="python -m minidist.mesh", description="Draw a mesh; no ranks are needed.",
        epilog="example: python -m minidist.mesh --dp 2 --pp 2 --tp 2")
    for axis in ORDER:
        parser.add_argument(f"--{axis}", type=flags.integer(1), default=1, metavar="N")
    parser.add_argument("--order", default=",".join(ORDER), metavar="A,B,C,D",
                        help="outermost axis first (default %(default)s)")
    args = parser.parse_args()
    sizes = ordered({axis: getattr(args, axis) for axis in ORDER}, args.order.split(","))
    shape = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    if environment.rank() == 0:
        print(f"DeviceMesh {shape}: {math.prod(sizes.values())} ranks, outermost axis first\n")
        print("\n".join(picture(sizes)))


if __name__ == "__main__":
    from minidist.ranks import launch
    launch.run(main)
