"""All-to-all: rank r's piece for rank s becomes rank s's piece from rank r, a transpose over ranks.

    rank 0   A0 A1 A2 A3            A0 B0 C0 D0
    rank 1   B0 B1 B2 B3     ->     A1 B1 C1 D1
    rank 2   C0 C1 C2 C3            A2 B2 C2 D2
    rank 3   D0 D1 D2 D3            A3 B3 C3 D3

    price per rank   messages        bytes, of the S that it holds
    pairwise         p-1             (p-1)/p S          every piece goes straight to its owner, all
                                                        at once: one wait
    bruck            ceil(log2 p)    about log2(p)/2 S  a message carries many pieces, and a piece
                                                        hops from rank to rank: for tiny pieces

The same exchange, adding what arrives, is a reduce_scatter; with one piece for all, an all_gather.

Lesson: mpirun -n 4 python -m lessons.collectives
Paper:  Bruck et al. 1997, "Efficient algorithms for all-to-all communications in
        multiport message-passing systems"
"""
from functools import cache

import numpy as np

from minidist.collectives.ring import cut


@cache
def partners(rank, size):
    """(to, source) of each step: mutual pairs if p is a power of two, else longer strides."""
    if size & (size - 1) == 0:
        return tuple((rank ^ step, rank ^ step) for step in range(1, size))
    return tuple(((rank + step) % size, (rank - step) % size) for step in range(1, size))


def pairwise(pieces, received, comm):
    """Send pieces[s] to rank s and fill received[s] from it.  p arrays each, sizes may differ

    Collective: every rank calls.  received[s] must have the size that rank s sends."""
    received[comm.rank][...] = pieces[comm.rank]
    comm.exchange([(pieces[to], to, received[source], source)
                   for to, source in partners(comm.rank, comm.size)])


def bruck(pieces, received, comm):
    """Send pieces[s] to rank s and fill received[s] from it, in ceil(log2 p) steps.  p of one size

    Collective: every rank calls.  A piece with i places to go hops over the powers of two in i."""
    size, rank, n = comm.size, comm.rank, pieces[0].size
    kept = comm.scratch(3 * size * n, pieces[0].dtype)
    work, packed, incoming = kept.reshape(3, size, n)
    for i in range(size):
        work[i] = pieces[(rank + i) % size].reshape(-1)
    for hop in (1 << k for k in range((size - 1).bit_length())):
        moving = [i for i in range(size) if i & hop]
        for slot, i in enumerate(moving):
            packed[slot] = work[i]
        comm.sendrecv(packed[:len(moving)], (rank + hop) % size,
                      into=incoming[:len(moving)], source=(rank - hop) % size)
        for slot, i in enumerate(moving):
            work[i] = incoming[slot]
    for i in range(size):                                  # what came over i places
        into = received[(rank - i) % size]
        into[...] = work[i].reshape(into.shape)


def reduce_scatter(pieces, mine, comm, op=np.add):
    """Sum over ranks into mine, rank r's piece r: an all_to_all that adds what arrives.  p arrays

    Collective: every rank calls.  Leaves the pieces as they are, which the ring cannot."""
    others = comm.size - 1
    came = cut(comm.scratch(others * mine.size, mine.dtype), (mine.size,) * others)
    comm.exchange([(pieces[to], to, into, source)
                   for (to, source), into in zip(partners(comm.rank, comm.size), came)])
    so_far = pieces[comm.rank]
    for piece in came:
        op(so_far, piece, out=mine)
        so_far = mine
    if so_far is not mine:                                  # alone: nothing to add
        mine[...] = so_far


def all_gather(pieces, comm):
    """Fill in every rank's piece, starting from pieces[r] on rank r.  p arrays, sizes may differ

    Collective: every rank calls.  Each sends its own to all, where the ring passes pieces on."""
    mine = pieces[comm.rank]
    comm.exchange([(mine, to, pieces[source], source)
                   for to, source in partners(comm.rank, comm.size)])
