"""How arrays are cut, and how a call is made: all that depends on shapes alone, worked out once.

    plan("reduce_scatter", algorithm, p, shape, dtype, op, dim, sizes)
        -> the function that does it, the one that adds, what must be equal on all ranks, the pieces

A call on an array of a shape seen before takes its plan from a cache of bounded size: for small
messages a few microseconds matter.

Lesson: mpirun -n 4 python -m lessons.collectives
"""
import zlib
from functools import lru_cache
from itertools import accumulate
from math import prod
from operator import index
from typing import NamedTuple

import numpy as np

from minidist.collectives.choice import find
from minidist.cost import chunks

OPS = {"sum": np.add, "max": np.maximum}


class Plan(NamedTuple):
    """How a call is made."""
    fn: object                      # the algorithm
    add: object                     # the NumPy function that sums, if any does
    detail: tuple                   # what must be the same on every rank
    pieces: object                  # a Layout, where there are pieces along a dim
    digest: int                     # seven bits of detail


@lru_cache(maxsize=1024)
def plan(collective, algorithm, p, shape, dtype, op=None, dim=None, sizes=None):
    """Plan a call on an array of this shape: my piece of an all_gather, else the full array.

    Pieces of an all_to_all may differ, so its plan is one for all: shape ()."""
    pieces = None
    if collective == "all_gather":
        pieces = gathered(shape, dim, sizes, p)
        shape = pieces.shape
    elif dim is not None:
        pieces = layout(shape, dim, sizes, p)
    algorithm, fn = find(collective, algorithm, prod(shape) * dtype.itemsize, p)
    detail = (algorithm, op, shape, dtype, dim, pieces and pieces.lengths)
    detail = tuple(d for d in detail if d is not None)
    return Plan(fn, op and function(op), detail, pieces, digest(detail))


def digest(detail):
    """Seven bits that tell what calls are made with, the same on every Python."""
    return zlib.crc32(repr(detail).encode()) % 127


class Layout(NamedTuple):
    """How an array of this shape is cut along a dim, one piece per rank."""
    shape: tuple
    index: tuple                    # where each piece is: x[index[r]]
    shapes: tuple                   # of the pieces
    lengths: tuple                  # elements in each
    in_a_row: bool                  # does a C-contiguous array hold one piece after the other?


@lru_cache(maxsize=1024)
def layout(shape, dim, sizes, p):
    """Cut a shape along dim into these sizes, by default as even as possible -> Layout"""
    sizes = chunks(shape[dim], p) if sizes is None else sizes
    dim %= len(shape)
    before, after = shape[:dim], shape[dim + 1:]
    whole, around = (slice(None),) * dim, prod(before) * prod(after)
    where = tuple((*whole, slice(end - size, end)) for size, end in zip(sizes, accumulate(sizes)))
    return Layout(shape, where, tuple((*before, size, *after) for size in sizes),
                  tuple(size * around for size in sizes), prod(before) == 1)


def gathered(shape, dim, sizes, p):
    """Put p pieces together, one of which has this shape; all alike without sizes -> Layout"""
    sizes = (shape[dim],) * p if sizes is None else sizes
    return layout(along(shape, dim, sum(sizes)), dim, sizes, p)


def along(shape, dim, size):
    """Shape with another length along dim."""
    shape = list(shape)
    shape[dim] = size
    return tuple(shape)


def split(x, dim, sizes):
    """Cut x along dim into views of these lengths."""
    return [x[where] for where in layout(x.shape, dim, tuple(sizes), len(sizes)).index]


def function(op):
    """The NumPy function of an op's name."""
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; it is one of {', '.join(OPS)}")
    return OPS[op]


# --- Sizes that a caller gives. ---

def checked(sizes, length, comm):
    """Refuse sizes that do not cut this length into a piece for every rank -> a tuple, or None"""
    if sizes is None:
        return None
    sizes = tuple(map(index, sizes))                        # 2.0 would be found as 2 in a cache
    if len(sizes) != comm.size or sum(sizes) != length or min(sizes) < 0:
        raise ValueError(f"sizes {list(sizes)} must be {comm.size} numbers, one per rank of "
                         f"'{comm.name}', none below 0, with sum {length}")
    return sizes


def checked_mine(sizes, length, comm):
    """Refuse a piece that is not as long as sizes says -> a tuple, or None"""
    if sizes is None:
        return None
    sizes = tuple(map(index, sizes))
    if len(sizes) != comm.size or sizes[comm.rank] != length or min(sizes) < 0:
        raise ValueError(f"rank {comm.rank} of {comm.size} in '{comm.name}' holds a piece of "
                         f"{length}, but sizes is {list(sizes)}")
    return sizes
