"""Double binary tree: log2 p steps like a tree, twice the vector like the ring (NCCL's tree).

In one binary tree half of the ranks are leaves: they receive, but pass nothing on.  So take two
trees, such that the leaves of one are the inner ranks of the other, and give each half the vector:

    first half               4             second half             3
                         /       \\                             /       \\
                       2           6                         5           1
                      / \\         / \\                       / \\         / \\
                     1   3       5   7                     6   4       2   0       (p = 8)
                    root 0 is above 4                     root 7 is above 3

Each half travels in chunks: up, adding, then down.  While one chunk is at the second level, the
next one is at the first, so that after log2 p steps of filling all levels work at once.

    price per rank   2S bytes for an inner rank, S for one that is a leaf twice; log2 p levels

Lesson: mpirun -n 4 python -m lessons.ring
Paper:  Sanders, Speck & Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction
        and scan"; the trees' shape is NCCL's (2.4, src/graph/trees.cc)
"""
import numpy as np

from minidist.cost.messages import TREE_CHUNK, chunks


def all_reduce(x, comm, op=np.add, chunk_bytes=TREE_CHUNK):
    """Sum in place over ranks, each half up and down its own tree, in chunks.  [n]

    Collective: every rank calls.  The root's sum goes to all, so all ranks agree bitwise."""
    steps = pipeline(x, comm, chunk_bytes)
    for chunk, (parent, children) in steps:
        climb(chunk, parent, children, comm, op)
    for chunk, (parent, children) in steps:
        descend(chunk, parent, children, comm)


def climb(chunk, parent, children, comm, op):
    """Add the children's sums to my chunk, and send it to the parent."""
    incoming = comm.scratch(chunk.size, chunk.dtype)
    for child in children:
        op(chunk, comm.recv(incoming, source=child), out=chunk)
    if parent is not None:
        comm.send(chunk, parent)


def descend(chunk, parent, children, comm):
    """Receive the finished chunk from the parent, and pass it on."""
    if parent is not None:
        comm.recv(chunk, source=parent)
    for child in children:
        comm.send(chunk, child)


def pipeline(x, comm, chunk_bytes):
    """List (chunk, my place in its tree), the chunks of both halves in turn.

    The order is the same on all ranks: the first unfinished chunk can always go on, even if sends
    wait for their receives."""
    middle = chunks(x.size, 2)[0]
    places = first_tree(comm.rank, comm.size), second_tree(comm.rank, comm.size)
    step = max(1, chunk_bytes // x.itemsize)
    halves = [(x[:middle], places[0]), (x[middle:], places[1])]
    return [(half[start:start + step], place)
            for start in range(0, max(middle, 1), step) for half, place in halves]


def first_tree(rank, size):
    """My (parent, children) in a binary tree whose leaves are the odd ranks; its root is 0.

    The lowest set bit of a rank is how far below it its children are, twice.  For 8 ranks:

        rank      0     1     2     3     4     5     6     7
        binary    000   001   010   011   100   101   110   111
        bit       -     1     2     1     4     1     2     1
        parent    -     2     4     2     0     6     4     6
    """
    if rank == 0:
        below = 1 << (size - 1).bit_length() >> 1
        return None, [below] if size > 1 else []
    bit = rank & -rank
    up = (rank ^ bit) | bit << 1         # clear the lowest set bit, set the next: 5 = 101 -> 110
    parent = up if up < size else rank ^ bit
    right = next((rank + down for down in powers_below(bit) if rank + down < size), None)
    children = [rank - bit // 2] if bit > 1 else []
    return parent, children + ([right] if right else [])


def powers_below(bit):
    """bit/2, bit/4, ... 1"""
    return [1 << k for k in reversed(range(bit.bit_length() - 1))]


def second_tree(rank, size):
    """My (parent, children) in the tree whose inner ranks are the leaves of the first.

    It is the first tree with other numbers on its ranks."""
    parent, children = first_tree(relabel(rank, size, -1), size)
    return (None if parent is None else relabel(parent, size, 1),
            [relabel(child, size, 1) for child in children])


def relabel(rank, size, by):
    """Mirror a rank's number; if the number of ranks is odd, shift it by one place instead."""
    return size - 1 - rank if size % 2 == 0 else (rank + by) % size
