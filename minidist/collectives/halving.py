"""Recursive halving and doubling: the ring's traffic in log2 p steps.

Ranks whose numbers differ in one bit swap halves of what they still share, the farthest first:

    rank 0   [ a0 a1 a2 a3 ]  with 2:  [ a0 a1 ]  with 1:  [ a0 ]      halve, adding what comes:
    rank 1   [ b0 b1 b2 b3 ]  with 3:  [ b0 b1 ]  with 0:  [ b1 ]      in the end rank r holds
    rank 2   [ c0 c1 c2 c3 ]  with 0:  [ c2 c3 ]  with 3:  [ c2 ]      piece r of the sum
    rank 3   [ d0 d1 d2 d3 ]  with 1:  [ d2 d3 ]  with 2:  [ d3 ]

and the same steps backwards, without adding, double the range that each holds.

    price per rank   2 log2 p messages, 2(p-1)/p of the vector; if p is not a power of two, a rank
                     into which another is folded sends the whole vector once more

Lesson: mpirun -n 4 python -m lessons.ring
Paper:  Rabenseifner 2004, "Optimization of collective reduction operations"
"""
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from minidist.collectives.ring import spans
from minidist.collectives.tree import bits, folded, place, team
from minidist.cost import chunks


def reduce_scatter(x, sizes, mine, comm, op=np.add):
    """Sum over ranks into mine, rank r's piece r.  [n]

    Collective: every rank calls.  sizes: the length of each rank's piece, a tuple.  x stays as it
    is, unless it is the working copy of whoever calls."""
    role = role_of(comm.rank, sizes)
    if role.into is not None:                               # folded: give all, get mine
        comm.send(x, role.into)
        comm.recv(mine, role.into)
        return
    work = comm.scratch(x.size, x.dtype, slot=1)            # may be x: element i only goes to i
    if role.guest is not None:
        x = op(x, comm.recv(comm.scratch(x.size, x.dtype), role.guest), out=work)
    x = halve(x, role.steps, comm, op, out=work)
    mine[...] = x[role.mine]
    if role.guest is not None:
        comm.send(x[role.theirs], role.guest)


def all_gather(x, sizes, comm):
    """Fill in all of x, starting from piece r on rank r.  [n]

    Collective: every rank calls.  sizes: the length of each rank's piece, a tuple."""
    role = role_of(comm.rank, sizes)
    if role.into is not None:                               # folded: give mine, get all
        comm.send(x[role.mine], role.into)
        comm.recv(x, role.into)
        return
    if role.guest is not None:
        comm.recv(x[role.theirs], role.guest)
    double(x, role.steps, comm)
    if role.guest is not None:
        comm.send(x, role.guest)


def all_reduce(x, comm, op=np.add):
    """Sum in place over ranks: halve, then double.  [n]

    Collective: every rank calls.  One rank finishes each piece, so all ranks agree bitwise."""
    steps = role_of(comm.rank, tuple(chunks(x.size, comm.size))).steps
    with folded(x, comm, op):
        halve(x, steps, comm, op, out=x)
        double(x, steps, comm)


def halve(x, steps, comm, op, out):
    """Swap ever smaller halves of x within the team, adding, until only my own range is left.

    Sums go to out, which may be x.  Returns the array that holds my range."""
    incoming = comm.scratch(x.size, x.dtype)
    for partner, mine, theirs in reversed(steps):
        kept = x[mine]
        came = comm.sendrecv(x[theirs], partner, incoming[:kept.size], partner)
        op(kept, came, out=out[mine])
        x = out
    return x


def double(x, steps, comm):
    """Swap what is finished within the team, from my own range up to all of x."""
    for partner, mine, theirs in steps:
        comm.sendrecv(x[mine], partner, x[theirs], partner)


class Role(NamedTuple):
    """What a rank does: its steps within the team, or whom it is folded into; where pieces lie."""
    steps: tuple                    # (partner, my block of ranges, the partner's), nearest first
    into: int | None                # as in tree.Place
    guest: int | None
    mine: slice                     # my piece
    theirs: slice | None            # my guest's piece


@lru_cache(maxsize=256)
def role_of(rank, sizes):
    """Work out a rank's Role, for pieces of these sizes.

    Blocks are 1, 2, 4, ... members' ranges long.  A member's range is its piece, and, just left
    of it, its guest's."""
    p, where = len(sizes), spans(sizes)
    partners, into, guest = place(rank, p)
    if into is not None:
        return Role((), into, None, where[rank], None)
    steps, members = [], team(p)
    bounds = [0, *(where[member].stop for member in members)]
    mine = members.index(rank)
    for bit, partner in zip(bits(p), partners):
        first = mine & -bit
        other = first ^ bit
        steps.append((partner, slice(bounds[first], bounds[first + bit]),
                      slice(bounds[other], bounds[other + bit])))
    return Role(tuple(steps), None, guest, where[rank], None if guest is None else where[guest])
