"""Ring AllReduce: sum a vector over p ranks while each rank sends only 2(p-1)/p of it.

The vector is cut into p chunks, and chunks only ever move one place to the right:

    reduce_scatter   p-1 hops, each adds what it meets   -> rank r holds the finished chunk r
    all_gather       p-1 hops, each leaves a copy        -> every rank holds every chunk

    price per rank   2(p-1) messages, 2(p-1)/p of the vector: about twice, however many ranks

Lesson: mpirun -n 4 python -m lessons.ring
Paper:  Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations"
"""
from functools import lru_cache
from itertools import accumulate

import numpy as np

from minidist import cost


def reduce_scatter(chunks, comm, op=np.add):
    """Sum in place; afterwards chunks[r] is complete on rank r.  p views, lengths may differ

    Collective: every rank calls.  op: np.add or np.maximum.  The other chunks end half summed."""
    incoming = comm.scratch(max(chunk.size for chunk in chunks), chunks[0].dtype)
    # The chunk I receive is always one index below the one I send, so it has met one more rank.
    for step in range(1, comm.size):
        mine = chunks[comm.rank - step - 1]
        op(mine, comm.shift(chunks[comm.rank - step], into=incoming[:mine.size]), out=mine)


def all_gather(chunks, comm):
    """Fill in every rank's chunk, starting from chunks[r] on rank r.  p views, lengths may differ

    Collective: every rank calls."""
    for step in range(comm.size - 1):
        comm.shift(chunks[comm.rank - step], into=chunks[comm.rank - step - 1])


def all_reduce(x, comm, op=np.add):
    """Sum in place over ranks: the finished chunks of a reduce_scatter, gathered.  [n]

    Collective: every rank calls.  Chunk c is summed in the order x_(c+1), x_(c+2), ..., x_c and
    then copied: the result is bitwise the same on every rank, and in every run."""
    pieces = cut(x, cost.chunks(x.size, comm.size))
    reduce_scatter(pieces, comm, op)
    all_gather(pieces, comm)


def cut(x, sizes):
    """Cut a vector into consecutive views.  [n] -> p views"""
    return [x[span] for span in spans(tuple(sizes))]


@lru_cache(maxsize=1024)
def spans(sizes):
    """Where consecutive pieces of these sizes lie: p slices, worked out once."""
    return tuple(slice(end - size, end) for size, end in zip(sizes, accumulate(sizes)))
