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

import numpy as np

from minidist.cost import chunks
from minidist.ring import spans
from minidist.tree import bits, place, team


def reduce_scatter(x, sizes, mine, comm, op=np.add):
    """Sum over ranks into mine, rank r's piece r; x stays as it is.  [n]

    Collective: every rank calls.  sizes: the length of each rank's piece, a tuple."""
    work = comm.scratch(x.size, x.dtype, slot=1)
    x = to_team(x, comm, op, work)
    x = halve(x, sizes, comm, op, work)
    _, helper, leaning = place(comm.rank, comm.size)
    if helper is not None:
        comm.recv(mine, helper)
        return
    mine[...] = x[spans(sizes)[comm.rank]]
    if leaning is not None:
        comm.send(x[spans(sizes)[leaning]], leaning)


def all_gather(x, sizes, comm):
    """Fill in all of x, starting from piece r on rank r.  [n]

    Collective: every rank calls.  sizes: the length of each rank's piece, a tuple."""
    to_team(leaning_piece(x, sizes, comm), comm)
    double(x, sizes, comm)
    from_team(x, comm)


def all_reduce(x, comm, op=np.add):
    """Sum in place over ranks: halve, then double.  [n]

    Collective: every rank calls.  One rank finishes each piece, so all ranks agree bitwise."""
    sizes = tuple(chunks(x.size, comm.size))
    to_team(x, comm, op, out=x)
    halve(x, sizes, comm, op, out=x)
    double(x, sizes, comm)
    from_team(x, comm)


def halve(x, sizes, comm, op, out):
    """Swap ever smaller halves of x within the team, adding, until only my own range is left.

    Sums go to out, which may be x.  Returns the array that holds my range."""
    incoming = comm.scratch(x.size, x.dtype)
    for partner, mine, theirs in reversed(halves(sizes, comm.rank)):
        kept = x[mine]
        came = comm.sendrecv(x[theirs], partner, incoming[:kept.size], partner)
        op(kept, came, out=out[mine])
        x = out
    return x


def double(x, sizes, comm):
    """Swap what is finished within the team, from my own range up to all of x."""
    for partner, mine, theirs in halves(sizes, comm.rank):
        comm.sendrecv(x[mine], partner, into=x[theirs], source=partner)


@lru_cache(maxsize=256)
def halves(sizes, rank):
    """List (partner, the block of ranges that has mine, the block that has the partner's).

    The blocks are 1, 2, 4, ... members' ranges long.  A member's range is its piece, and, just left
    of it, the piece of the rank that leans on it."""
    members, ends = team(len(sizes)), list(accumulate(sizes))
    if rank not in members:
        return ()
    bounds = [0, *(ends[member] for member in members)]
    mine = members.index(rank)
    steps = []
    for bit, partner in zip(bits(len(sizes)), place(rank, len(sizes)).partners):
        first, other = mine & -bit, mine & -bit ^ bit
        steps.append((partner, slice(bounds[first], bounds[first + bit]),
                      slice(bounds[other], bounds[other + bit])))
    return tuple(steps)


# --- Ranks outside the team: before and after. ---

def leaning_piece(x, sizes, comm):
    """The piece of the rank outside the team that I am or that leans on me (for others: mine)."""
    leaning = place(comm.rank, comm.size).leaning
    return x[spans(sizes)[comm.rank if leaning is None else leaning]]


def to_team(x, comm, op=None, out=None):
    """Send x from the ranks outside the team to their helpers, who copy it, or add it into out.

    Returns the array that holds what I go on with."""
    _, helper, leaning = place(comm.rank, comm.size)
    if helper is not None:
        comm.send(x, helper)
    if leaning is not None:
        came = comm.recv(comm.scratch(x.size, x.dtype) if op else x, leaning)
        if op:
            return op(x, came, out=out)
    return x


def from_team(x, comm):
    """Send x from the helpers to the ranks outside the team."""
    _, helper, leaning = place(comm.rank, comm.size)
    if leaning is not None:
        comm.send(x, leaning)
    if helper is not None:
        comm.recv(x, helper)
