"""Trees: few steps, so they are fast for small messages, whose steps cost more than their bytes.

Binomial tree over 8 ranks: in step k, everyone who has the message passes it on 8/2^k places.

    0 ----------------------> 4         broadcast   down the tree, from the root
    0 ----------> 2           4 --> 6   reduce      up the tree, adding on the way
    0 --> 1       2 --> 3     4 --> 5   6 --> 7

Recursive doubling: in step k, ranks that differ in bit k exchange all they have and both add, so
that after log2 p steps everyone holds the sum of all.

    price        steps (at the root)   bytes sent by the busiest rank      (S: the vector's bytes)
    naive        2(p-1)                (p-1) S
    tree         2 ceil(log2 p)        ceil(log2 p) S
    doubling     log2 p                log2(p) S

Lesson: mpirun -n 4 python -m lessons.ring
Paper:  Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations
        in MPICH"
"""
from functools import cache
from typing import NamedTuple

import numpy as np


# --- Every rank talks to the root: the baseline of all others. ---

def naive_reduce(x, comm, root=0, op=np.add):
    """Sum in place on root, which receives p-1 vectors one after the other.  [n]"""
    if comm.rank != root:
        comm.send(x, root)
        return
    incoming = comm.scratch(x.size, x.dtype)
    for rank in others(comm, root):
        op(x, comm.recv(incoming, source=rank), out=x)


def naive_broadcast(x, comm, root=0):
    """Fill x from the root, which sends it p-1 times.  [n]"""
    if comm.rank != root:
        comm.recv(x, source=root)
        return
    for rank in others(comm, root):
        comm.send(x, rank)


def naive_all_reduce(x, comm, op=np.add):
    """Sum in place: all to rank 0, and back.  [n]"""
    naive_reduce(x, comm, 0, op)
    naive_broadcast(x, comm, 0)


def others(comm, root):
    """List all ranks but the root."""
    return [rank for rank in range(comm.size) if rank != root]


# --- Binomial tree: the tree's shape is in the bits of a rank, counted from the root. ---

def broadcast(x, comm, root=0):
    """Fill x from the root, down a binomial tree.  [n]

    Collective: every rank calls."""
    place, bit = place_in_tree(comm, root)
    if place:
        comm.recv(x, source=(comm.rank - bit) % comm.size)
    while bit > 1:
        bit //= 2
        if place + bit < comm.size:
            comm.send(x, (comm.rank + bit) % comm.size)


def reduce(x, comm, root=0, op=np.add):
    """Sum in place on root, up a binomial tree; elsewhere x ends as a partial sum.  [n]

    Collective: every rank calls."""
    place, top = place_in_tree(comm, root)
    incoming = comm.scratch(x.size, x.dtype)
    bit = 1
    while bit < top:
        if place + bit < comm.size:
            op(x, comm.recv(incoming, source=(comm.rank + bit) % comm.size), out=x)
        bit *= 2
    if place:
        comm.send(x, (comm.rank - top) % comm.size)


def all_reduce(x, comm, op=np.add):
    """Sum in place: up a binomial tree to rank 0, and down again.  [n]"""
    reduce(x, comm, 0, op)
    broadcast(x, comm, 0)


def place_in_tree(comm, root):
    """My place counted from the root, and its lowest set bit: the distance to my parent.

    The root has none; its bit is the first power of two that reaches p."""
    place = (comm.rank - root) % comm.size
    bit = place & -place if place else 1 << (comm.size - 1).bit_length()
    return place, bit


# --- Recursive doubling: every rank works in every step. ---

def recursive_doubling(x, comm, op=np.add):
    """Sum in place over ranks, exchanging the whole vector with one partner per bit.  [n]

    Collective: every rank calls.  Partners add the same two numbers, so all ranks agree bitwise."""
    with folded(x, comm, op) as partners:
        incoming = comm.scratch(x.size, x.dtype)
        for partner in partners:
            op(x, comm.sendrecv(x, partner, incoming, partner), out=x)


# --- Folding: where a power of two is needed, the extra ranks are folded into others. ---
#
# Of p ranks with e more than a power of two, ranks 0, 2, ... 2e-2 are each folded into their right
# neighbour: it takes part for both, and hands back the result.  All others are the team.

class folded:
    """Fold x of the extra ranks into the team's; give my partners there; unfold the result.

    A rank that is folded gives all of x, has no partners, and gets all of x at the end.  A class,
    since contextlib's generator would cost a small all_reduce a quarter of its time."""
    __slots__ = "x", "comm", "place"

    def __init__(self, x, comm, op):
        self.x, self.comm, self.place = x, comm, place(comm.rank, comm.size)
        if self.place.into is not None:
            comm.send(x, self.place.into)
        elif self.place.guest is not None:
            op(x, comm.recv(comm.scratch(x.size, x.dtype), self.place.guest), out=x)

    def __enter__(self):
        return self.place.partners

    def __exit__(self, error, *_):
        if error is None and self.place.into is not None:
            self.comm.recv(self.x, self.place.into)
        elif error is None and self.place.guest is not None:
            self.comm.send(self.x, self.place.guest)


class Place(NamedTuple):
    """What a rank does where only a power of two can work."""
    partners: tuple                 # members whose places differ from mine in bit 1, 2, 4, ...
    into: int | None                # the member that I am folded into, if I am
    guest: int | None               # the rank that is folded into me, if one is


@cache
def team(size):
    """The ranks that are not folded, a power of two; of 6 ranks 0 goes into 1, 2 into 3: 1 3 4 5"""
    extra = size - (1 << size.bit_length() - 1)
    return (*range(1, 2 * extra, 2), *range(2 * extra, size))


def bits(size):
    """1, 2, 4, ... below the size of the team of so many ranks."""
    return [1 << k for k in range(size.bit_length() - 1)]


@cache
def place(rank, size):
    """My Place among so many ranks."""
    members = team(size)
    if rank not in members:
        return Place((), rank + 1, None)
    mine = members.index(rank)
    partners = tuple(members[mine ^ bit] for bit in bits(size))
    return Place(partners, None, rank - 1 if rank and rank - 1 not in members else None)
