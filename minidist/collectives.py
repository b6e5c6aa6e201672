"""The collectives everything above uses: arrays in, arrays out, and the algorithm chosen by size.

                     before (rank r)        after (rank r)
    all_reduce       x_r                    x_0 + x_1 + ... + x_(p-1)
    reduce_scatter   x_r                    piece r of the sum
    all_gather       piece r                all pieces
    broadcast        x on the root          x
    reduce           x_r                    the sum, on the root
    scatter          x on the root          piece r of x
    gather           piece r                all pieces, on the root
    all_to_all       pieces for 0 .. p-1    pieces from 0 .. p-1

Every function is collective: all ranks of the group call it, in the same order, with the same
keywords.  Inputs may have any strides and stay as they are; dtype and shape are kept.  out=, if
given, takes the result: a C-contiguous array of the right shape and dtype.

Lesson: mpirun -n 4 python -m lessons.collectives
"""
from itertools import accumulate
from math import prod

import numpy as np

from minidist.algorithms import ALGORITHMS, chosen, find                        # noqa: F401
from minidist.buffers import apart
from minidist.cost import chunks
from minidist.ring import cut

OPS = {"sum": np.add, "max": np.maximum}


def all_reduce(x, comm, op="sum", out=None, algorithm=None):
    """Sum (or max) over ranks; out=x: in place.  any shape -> same shape"""
    add, out = OPS.get(op) or function(op), start(x, out)
    flat = out if out.ndim == 1 else out.reshape(-1)
    algorithm, fn = find("all_reduce", algorithm, out.nbytes, comm.size)
    with comm.operation("all_reduce", (algorithm, op, out.shape, out.dtype)):
        fn(flat, comm, add)
    return out


def reduce_scatter(x, comm, dim=0, sizes=None, op="sum", out=None, algorithm=None):
    """Sum (or max) over ranks and keep piece r along dim.  [n] -> [n/p]

    sizes: the length of each rank's piece, by default as np.array_split cuts."""
    x, add = np.asarray(x), function(op)
    pieces = pieces_of(x, dim, sizes, comm)
    mine = result(pieces[comm.rank].shape, x.dtype, out)
    lengths = [piece.size for piece in pieces]
    algorithm, fn = find("reduce_scatter", algorithm, x.nbytes, comm.size)
    with comm.operation("reduce_scatter", (algorithm, op, x.shape, x.dtype, lengths)):
        if algorithm == "pairwise" and follow_each_other(x, dim):
            fn(x.reshape(-1), lengths, mine.reshape(-1), comm, add)
        else:
            fn(copied(pieces, lengths, comm), lengths, mine.reshape(-1), comm, add)
    return mine


def all_gather(x, comm, dim=0, sizes=None, out=None, algorithm=None):
    """Put the ranks' pieces together along dim, in rank order.  [n/p] -> [n]

    sizes: the length of each rank's piece; without it, all are as long as mine."""
    x = np.asarray(x)
    sizes = sizes or [x.shape[dim]] * comm.size
    check_mine(x.shape[dim], sizes, comm)
    whole = result(along(x.shape, dim, sum(sizes)), x.dtype, out)
    pieces = split(whole, dim, sizes)
    lengths = [piece.size for piece in pieces]
    algorithm, fn = find("all_gather", algorithm, whole.nbytes, comm.size)
    with comm.operation("all_gather", (algorithm, whole.shape, x.dtype, lengths)):
        if follow_each_other(whole, dim):
            pieces[comm.rank][...] = x
            fn(whole.reshape(-1), lengths, comm)
        else:
            work = comm.scratch(whole.size, x.dtype, slot=1)
            came = [flat.reshape(piece.shape) for flat, piece in zip(cut(work, lengths), pieces)]
            came[comm.rank][...] = x
            fn(work, lengths, comm)
            np.concatenate(came, axis=dim, out=whole)
    return whole


def broadcast(x, comm, root=0, out=None, algorithm=None):
    """Give every rank the root's array.  any shape -> same shape

    On the other ranks only the shape and dtype of x matter."""
    out = start(x, out)
    algorithm, fn = find("broadcast", algorithm, out.nbytes, comm.size)
    with comm.operation("broadcast", (algorithm, root, out.shape, out.dtype)):
        fn(out.reshape(-1), comm, root)
    return out


def reduce(x, comm, root=0, op="sum", out=None, algorithm=None):
    """Sum (or max) over ranks: the result on root, None elsewhere.  any shape -> same shape"""
    x, add = np.asarray(x), function(op)
    if comm.rank == root:
        out = start(x, out)
    else:                                                   # partial sums need a place too
        out = copied([x], [x.size], comm)
    algorithm, fn = find("reduce", algorithm, x.nbytes, comm.size)
    with comm.operation("reduce", (algorithm, op, root, x.shape, x.dtype)):
        fn(out.reshape(-1), comm, root, add)
    return out if comm.rank == root else None


def scatter(x, comm, root=0, sizes=None):
    """Give rank r piece r (along the first dimension) of the root's array.  [n] -> [n/p]

    On the other ranks only the shape and dtype of x matter.  sizes: as np.array_split cuts."""
    x = np.asarray(x)
    pieces = pieces_of(x, 0, sizes, comm)
    mine = np.array(pieces[comm.rank], order="C")
    with comm.operation("scatter", (root, [len(piece) for piece in pieces], x.dtype)):
        if comm.rank != root:
            comm.recv(mine, source=root)
        else:
            for rank in others(comm):
                comm.send(np.ascontiguousarray(pieces[rank]), rank)
    return mine


def gather(x, comm, root=0, sizes=None):
    """Put the ranks' pieces together on root, along the first dimension; None elsewhere.

    sizes: the length of each rank's piece; without it, all are as long as mine."""
    x = np.ascontiguousarray(x)
    sizes = sizes or [len(x)] * comm.size
    check_mine(len(x), sizes, comm)
    with comm.operation("gather", (root, list(sizes), x.dtype)):
        if comm.rank != root:
            comm.send(x, root)
            return None
        whole = np.empty(along(x.shape, 0, sum(sizes)), x.dtype)
        pieces = split(whole, 0, sizes)
        pieces[root][...] = x
        for rank in others(comm):
            comm.recv(pieces[rank], source=rank)
    return whole


def all_to_all(pieces, comm, shapes=None, out=None, algorithm=None):
    """Send pieces[s] to rank s; return what every rank sent to me.  p arrays -> p arrays

    shapes: of what I receive; without it, rank s sends me what I send it.  If pieces is one array,
    it holds p equal pieces on every rank, and small ones may take Bruck's way."""
    if not isinstance(pieces, np.ndarray):
        algorithm = algorithm or "pairwise"             # only I know that mine are equal
    pieces = [np.ascontiguousarray(piece) for piece in pieces]
    shapes = shapes or [piece.shape for piece in pieces]
    received = [result(tuple(shape), pieces[0].dtype, into)
                for shape, into in zip(shapes, out or [None] * comm.size)]
    nbytes = sum(piece.nbytes for piece in pieces)
    algorithm, fn = find("all_to_all", algorithm, nbytes, comm.size)
    check_pieces(pieces, algorithm, comm)
    with comm.operation("all_to_all", (algorithm, pieces[0].dtype)):
        fn([piece.reshape(-1) for piece in pieces], [piece.reshape(-1) for piece in received], comm)
    return received


# --- Where arrays come from and how they are cut. ---

def function(op):
    """The NumPy function of an op's name."""
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; it is one of {', '.join(OPS)}")
    return OPS[op]


def start(x, out):
    """The contiguous array that holds x now and takes the result later: out, or a copy of x."""
    if out is x and x.flags.carray:                         # in place, and nothing to ask
        return x
    x = np.asarray(x)
    out = result(x.shape, x.dtype, out)
    out[...] = x
    return out


def result(shape, dtype, out):
    """The array that takes the result: out, if it can, or a new one."""
    if out is None:
        return apart(shape, dtype)
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, the result {dtype} {list(shape)}")
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"out ({dtype} {list(shape)}) is not C-contiguous and writeable: only a "
                         "copy would change; leave out= away and use what is returned")
    return out


def split(x, dim, sizes):
    """Cut x along dim into views of these lengths."""
    before = (slice(None),) * (dim % x.ndim)
    return [x[(*before, slice(end - size, end))] for size, end in zip(sizes, accumulate(sizes))]


def pieces_of(x, dim, sizes, comm):
    """Cut x along dim into views, one per rank: of these lengths, or as even as possible."""
    sizes = sizes or chunks(x.shape[dim], comm.size)
    if len(sizes) != comm.size or sum(sizes) != x.shape[dim]:
        raise ValueError(f"sizes {list(sizes)} must be {comm.size} numbers, one per rank of "
                         f"'{comm.name}', with sum {x.shape[dim]}")
    return split(x, dim, sizes)


def check_mine(length, sizes, comm):
    """Refuse a piece that is not as long as sizes says."""
    if len(sizes) != comm.size or sizes[comm.rank] != length:
        raise ValueError(f"rank {comm.rank} of {comm.size} in '{comm.name}' holds a piece of "
                         f"{length}, but sizes is {list(sizes)}")


def check_pieces(pieces, algorithm, comm):
    """Refuse what an all_to_all cannot send."""
    if len(pieces) != comm.size:
        raise ValueError(f"all_to_all has {len(pieces)} pieces for the {comm.size} ranks of "
                         f"'{comm.name}'")
    if algorithm == "bruck" and len({piece.size for piece in pieces}) > 1:
        raise ValueError("bruck needs equal pieces, these have "
                         f"{[piece.size for piece in pieces]} elements; use algorithm='pairwise'")


def along(shape, dim, size):
    """Shape with another length along dim."""
    shape = list(shape)
    shape[dim] = size
    return tuple(shape)


def follow_each_other(x, dim):
    """Whether pieces of x along dim lie in memory one after the other."""
    return x.flags.c_contiguous and prod(x.shape[:dim]) == 1


def copied(pieces, lengths, comm):
    """A kept vector with the pieces one after the other, which may be overwritten."""
    work = comm.scratch(sum(lengths), pieces[0].dtype, slot=1)
    for flat, piece in zip(cut(work, lengths), pieces):
        flat.reshape(piece.shape)[...] = piece
    return work


def others(comm):
    """All ranks but mine."""
    return [rank for rank in range(comm.size) if rank != comm.rank]
