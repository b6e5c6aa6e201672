"""Hierarchical AllReduce: inside the nodes, across the nodes, inside the nodes again.

    node 0           node 1                   two nodes of three ranks: the three rails are
    0   1   2        3   4   5                 {0, 3}  {1, 4}  {2, 5}

    reduce_scatter   in each node, a ring     -> rank k of a node holds chunk k of the node's sum
    all_reduce       on each rail, a ring     -> ... of everybody's sum
    all_gather       in each node, a ring     -> every rank holds everything

    price            k nodes of g ranks: 2(g-1) + 2(k-1) steps instead of 2(gk-1).  The total number
                     of bytes is the flat ring's; but the bytes between two nodes go through g
                     network ports at once instead of one

Lesson: mpirun -n 4 python -m lessons.collectives
Paper:  Thakur, Rabenseifner & Gropp 2005, section 6; NCCL and Horovod know it by this name
"""
from typing import NamedTuple

import numpy as np

from minidist.collectives import ring
from minidist.cost import chunks
from minidist.ranks.comm import Comm


class Groups(NamedTuple):
    """My two groups, and how many rails there are: as many as the smallest node has ranks."""
    node: Comm
    rail: Comm | None
    rails: int


def all_reduce(x, groups, op=np.add):
    """Sum in place over all ranks of all nodes.  [n]

    Collective: every rank calls.  On larger nodes, the ranks beyond the rails have empty chunks."""
    node, rail, rails = groups
    pieces = ring.cut(x, chunks(x.size, rails) + [0] * (node.size - rails))
    with node.operation("reduce_scatter"):
        ring.reduce_scatter(pieces, node, op)
    if rail is not None:
        with rail.operation("all_reduce"):
            ring.all_reduce(pieces[node.rank], rail, op)
    with node.operation("all_gather"):
        ring.all_gather(pieces, node)


def groups(comm, node=None):
    """Form my node's group and my rail: the ranks that have my place on the other nodes.

    Collective: every rank calls.  node: a group to use instead of the machine's ranks."""
    node = node or comm.node()
    smallest = np.array([-node.size])
    ring.all_reduce(smallest, comm, np.maximum)
    rails = -int(smallest[0])
    return Groups(node, comm.split(node.rank if node.rank < rails else None, name="rail"), rails)
