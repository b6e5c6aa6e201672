"""Recursive halving and doubling: the ring's traffic in log2 p steps.

Ranks whose numbers differ in one bit swap halves of what they still share, the farthest first:

    rank 0   [ a0 a1 a2 a3 ]  with 2:  [ a0 a1 ]  with 1:  [ a0 ]      halve, adding what comes:
    rank 1   [ b0 b1 b2 b3 ]  with 3:  [ b0 b1 ]  with 0:  [ b1 ]      in the end rank r holds
    rank 2   [ c0 c1 c2 c3 ]  with 0:  [ c2 c3 ]  with 3:  [ c2 ]      piece r of the sum
    rank 3   [ d0 d1 d2 d3 ]  with 1:  [ d2 d3 ]  with 2:  [ d3 ]

and the same steps backwards, without adding, double the range that each holds.

    price per rank   2 log2 p messages, 2(p-1)/p of the vector; if p is not a power of two, those
                     who help a rank outside the team send the whole vector once more

Lesson: mpirun -n 4 python -m lessons.ring
Paper:  Rabenseifner 2004, "Optimization of collective reduction operations"
"""
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from minidist.collectives.ring import spans
from minidist.collectives.tree import bits, place, team
from minidist.cost import chunks


def reduce_scatter(x, sizes, mine, comm, op=np.add):
    """Sum over ranks into mine, rank r's piece r; x stays as it is.  [n]

    Collective: every rank calls.  sizes: the length of each rank's piece, a tuple."""
    role = role_of(comm.rank, sizes)
    if role.helper is not None:                             # outside the team: give all, get mine
        comm.send(x, role.helper)
        comm.recv(mine, role.helper)
        return
    work = comm.scratch(x.size, x.dtype, slot=1)
    if role.leaning is not None:
        x = op(x, comm.recv(comm.scratch(x.size, x.dtype), role.leaning), out=work)
    x = halve(x, role.steps, comm, op, out=work)
    mine[...] = x[role.mine]
    if role.leaning is not None:
        comm.send(x[role.theirs], role.leaning)


def all_gather(x, sizes, comm):
    """Fill in all of x, starting from piece r on rank r.  [n]

    Collective: every rank calls.  sizes: the length of each rank's piece, a tuple."""
    role = role_of(comm.rank, sizes)
    if role.helper is not None:                             # outside the team: give mine, get all
        comm.send(x[role.mine], role.helper)
        comm.recv(x, role.helper)
        return
    if role.leaning is not None:
        comm.recv(x[role.theirs], role.leaning)
    double(x, role.steps, comm)
    if role.leaning is not None:
        comm.send(x, role.leaning)


def all_reduce(x, comm, op=np.add):
    """Sum in place over ranks: halve, then double.  [n]

    Collective: every rank calls.  One rank finishes each piece, so all ranks agree bitwise."""
    role = role_of(comm.rank, tuple(chunks(x.size, comm.size)))
    if role.helper is not None:                             # outside the team: give all, get all
        comm.send(x, role.helper)
        comm.recv(x, role.helper)
        return
    if role.leaning is not None:
        op(x, comm.recv(comm.scratch(x.size, x.dtype), role.leaning), out=x)
    halve(x, role.steps, comm, op, out=x)
    double(x, role.steps, comm)
    if role.leaning is not None:
        comm.send(x, role.leaning)


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
    """What a rank does: its steps within the team, or who works for it; and where pieces lie."""
    steps: tuple                    # (partner, my block of ranges, the partner's), nearest first
    helper: int | None              # who works for me, if I am outside the team
    leaning: int | None             # for whom I work besides
    mine: slice                     # my piece
    theirs: slice | None            # the piece of the rank that leans on me


@lru_cache(maxsize=1024)
def role_of(rank, sizes):
    """Work out a rank's Role, for pieces of these sizes.

    Blocks are 1, 2, 4, ... members' ranges long.  A member's range is its piece, and, just left
    of it, the piece of the rank that leans on it."""
    p = len(sizes)
    partners, helper, leaning = place(rank, p)
    theirs = None if leaning is None else spans(sizes)[leaning]
    steps, members, ends = [], team(p), list(accumulate(sizes))
    bounds = [0, *(ends[member] for member in members)]
    for bit, partner in zip(bits(p), partners):
        mine = members.index(rank)
        first, other = mine & -bit, mine & -bit ^ bit
        steps.append((partner, slice(bounds[first], bounds[first + bit]),
                      slice(bounds[other], bounds[other + bit])))
    return Role(tuple(steps), helper, leaning, spans(sizes)[rank], theirs)
