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
import numpy as np

from minidist.collectives import layouts
from minidist.collectives.layouts import checked, checked_mine, gathered, layout, plan
from minidist.collectives.ring import cut
from minidist.ranks import agree
from minidist.ranks.buffers import apart


def all_reduce(x, comm, op="sum", out=None, algorithm=None):
    """Sum (or max) over ranks; out=x: in place.  any shape -> same shape"""
    out = start(x, out)
    fn, add, detail, _, digest = plan("all_reduce", algorithm, comm.size, out.shape, out.dtype, op)
    with comm.operation("all_reduce", detail, digest):
        fn(flat(out), comm, add)
    return out


def reduce_scatter(x, comm, dim=0, sizes=None, op="sum", out=None, algorithm=None):
    """Sum (or max) over ranks and keep piece r along dim.  [n] -> [n/p]

    sizes: the length of each rank's piece, by default as np.array_split cuts."""
    x, dim = to_cut(x, dim)
    sizes = checked(sizes, x.shape[dim], comm)
    fn, add, detail, pieces, digest = plan("reduce_scatter", algorithm, comm.size, x.shape, x.dtype,
                                           op, dim, sizes)
    mine, x = result(pieces.shapes[comm.rank], x.dtype, out), aside(x, out)
    with comm.operation("reduce_scatter", detail, digest):
        fn(in_a_row(x, pieces, comm), pieces.lengths, flat(mine), comm, add)
    return mine


def all_gather(x, comm, dim=0, sizes=None, out=None, algorithm=None):
    """Put the ranks' pieces together along dim, in rank order.  [n/p] -> [n]

    sizes: the length of each rank's piece; without it, all are as long as mine."""
    x, dim = to_cut(x, dim)
    sizes = checked_mine(sizes, x.shape[dim], comm)
    fn, _, detail, pieces, digest = plan("all_gather", algorithm, comm.size, x.shape, x.dtype, None,
                                         dim, sizes)
    whole = result(pieces.shape, x.dtype, out)
    with comm.operation("all_gather", detail, digest):
        if pieces.in_a_row:
            whole[pieces.index[comm.rank]] = x
            fn(flat(whole), pieces.lengths, comm)
        else:
            work = comm.scratch(whole.size, x.dtype, slot=1)
            came = [part.reshape(shape)
                    for part, shape in zip(cut(work, pieces.lengths), pieces.shapes)]
            came[comm.rank][...] = x
            fn(work, pieces.lengths, comm)
            np.concatenate(came, axis=dim, out=whole)
    return whole


def broadcast(x, comm, root=0, out=None, algorithm=None):
    """Give every rank the root's array.  any shape -> same shape

    On the other ranks only the shape and dtype of x matter."""
    root, out = member(root, comm), start(x, out)
    fn, _, detail, _, digest = plan("broadcast", algorithm, comm.size, out.shape, out.dtype)
    with comm.operation("broadcast", (root, *detail), digest + root):
        fn(flat(out), comm, root)
    return out


def reduce(x, comm, root=0, op="sum", out=None, algorithm=None):
    """Sum (or max) over ranks: the result on root, None elsewhere.  any shape -> same shape"""
    root, x = member(root, comm), array(x)
    fn, add, detail, _, digest = plan("reduce", algorithm, comm.size, x.shape, x.dtype, op)
    if comm.rank == root:
        out = start(x, out)
    else:                                                   # partial sums need a place too
        out = comm.scratch(x.size, x.dtype, slot=1)
        out.reshape(x.shape)[...] = x
    with comm.operation("reduce", (root, *detail), digest + root):
        fn(flat(out), comm, root, add)
    return out if comm.rank == root else None


def scatter(x, comm, root=0, sizes=None):
    """Give rank r piece r (along the first dimension) of the root's array.  [n] -> [n/p]

    On the other ranks only the shape and dtype of x matter.  sizes: as np.array_split cuts."""
    root, (x, _) = member(root, comm), to_cut(x, 0)
    pieces = layout(x.shape, 0, checked(sizes, len(x), comm), comm.size)
    mine = np.array(x[pieces.index[comm.rank]], order="C")
    detail = root, x.shape[1:], x.dtype, pieces.lengths
    with comm.operation("scatter", detail, layouts.digest(detail)):
        if comm.rank != root:
            comm.recv(mine, source=root)
        else:
            for rank in others(comm):
                comm.send(np.ascontiguousarray(x[pieces.index[rank]]), rank)
    return mine


def gather(x, comm, root=0, sizes=None):
    """Put the ranks' pieces together on root, along the first dimension; None elsewhere.

    sizes: the length of each rank's piece; without it, all are as long as mine."""
    root, x = member(root, comm), np.ascontiguousarray(to_cut(x, 0)[0])
    pieces = gathered(x.shape, 0, checked_mine(sizes, len(x), comm), comm.size)
    detail = root, x.shape[1:], x.dtype, pieces.lengths
    with comm.operation("gather", detail, layouts.digest(detail)):
        if comm.rank != root:
            comm.send(x, root)
            return None
        whole = np.empty(pieces.shape, x.dtype)
        whole[pieces.index[root]] = x
        for rank in others(comm):
            comm.recv(whole[pieces.index[rank]], source=rank)
    return whole


def all_to_all(pieces, comm, shapes=None, out=None, algorithm=None):
    """Send pieces[s] to rank s; return what every rank sent to me.  p arrays -> p arrays

    shapes: of what I receive; without it, rank s sends me what I send it.  If pieces is one array,
    it holds p equal pieces, and the result is one array too."""
    if not isinstance(pieces, (list, tuple)) and shapes is None:
        pieces = np.ascontiguousarray(to_cut(pieces, 0)[0])
        if pieces.shape[:1] != (comm.size,):
            raise wrong_number(len(pieces), comm)
        dtype, received = pieces.dtype, result(pieces.shape, pieces.dtype, out)
        pieces, shapes = aside(pieces, out), [piece.shape for piece in pieces]
    else:
        pieces = [np.ascontiguousarray(array(piece)) for piece in pieces]
        check_pieces(pieces, shapes, algorithm, comm)
        dtype = pieces[0].dtype
        shapes, out = shapes or [piece.shape for piece in pieces], out or [None] * comm.size
        received = [result(tuple(s), dtype, into) for s, into in zip(shapes, out)]
        pieces = [aside(piece, *out) for piece in pieces]
    fn, _, detail, _, digest = plan("all_to_all", algorithm, comm.size, (), dtype)
    with comm.operation("all_to_all", detail, digest):
        if comm.check:
            agree.same_shapes(comm, [piece.shape for piece in pieces], shapes)
        fn(pieces, received, comm)
    return received


# --- Where arrays come from. ---

def array(x):
    """What a caller brings, as an array; refuse what would lose its meaning."""
    if type(x) is np.ndarray:
        return x
    if x is None:
        raise TypeError("None is no array: every rank brings one, since shape and dtype matter; "
                        "np.empty(shape, dtype) does where values do not")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask on the way: use x.filled(value)")
    if getattr(x, "requires_grad", False):
        raise TypeError("a Tensor that requires a gradient would lose it here: "
                        "minidist.mappings has the same calls for Tensors")
    return np.asarray(x)


def to_cut(x, dim):
    """An array that has this dim -> it, and the dim counted from the left"""
    x = array(x)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"there is no dim {dim} to cut in an array of shape {list(x.shape)}")
    return x, dim % x.ndim


def aside(x, *outs):
    """x, or a copy of it if one of the arrays that take the result shares its memory."""
    if any(out is not None and np.may_share_memory(x, out) for out in outs):
        return x.copy()
    return x


def member(root, comm):
    """The root, if it is a rank of the group."""
    if not isinstance(root, (int, np.integer)) or not 0 <= root < comm.size:
        raise ValueError(f"root {root} is not in group {comm.name}, which has ranks 0 to "
                         f"{comm.size - 1}")
    return int(root)


def start(x, out):
    """The contiguous array that holds x now and takes the result later: out, or a copy of x."""
    if out is x and type(x) is np.ndarray and x.flags.carray:    # in place, and nothing to ask
        return x
    x = array(x)
    out = result(x.shape, x.dtype, out)
    out[...] = x
    return out


def result(shape, dtype, out):
    """The array that takes the result: out, if it can, or a new one."""
    if out is None:
        return apart(shape, dtype)
    if out.shape != shape or out.dtype is not dtype and out.dtype != dtype:
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, the result {dtype} {list(shape)}")
    if not out.flags.carray:
        raise ValueError(f"out ({dtype} {list(shape)}) is not C-contiguous and writeable: only a "
                         "copy would change; leave out= away and use what is returned")
    return out


def wrong_number(pieces, comm):
    """The error that tells how many pieces there must be."""
    return ValueError(f"all_to_all has {pieces} pieces for the {comm.size} ranks of '{comm.name}'")


def check_pieces(pieces, shapes, algorithm, comm):
    """Refuse what an all_to_all cannot send, or cannot keep."""
    if len(pieces) != comm.size:
        raise wrong_number(len(pieces), comm)
    if shapes is not None and tuple(shapes[comm.rank]) != pieces[comm.rank].shape:
        raise ValueError(f"rank {comm.rank} of '{comm.name}' keeps its piece of "
                         f"{list(pieces[comm.rank].shape)}, but shapes says "
                         f"{list(shapes[comm.rank])}")
    if algorithm == "bruck" and len({piece.size for piece in pieces}) > 1:
        raise ValueError("bruck needs equal pieces, these have "
                         f"{[piece.size for piece in pieces]} elements; use algorithm='pairwise'")


def in_a_row(x, pieces, comm):
    """A vector with the pieces of x one after the other: x itself, or else a kept copy."""
    if pieces.in_a_row and x.flags.c_contiguous:
        return flat(x)
    work = comm.scratch(x.size, x.dtype, slot=1)
    for part, where, shape in zip(cut(work, pieces.lengths), pieces.index, pieces.shapes):
        part.reshape(shape)[...] = x[where]
    return work


def flat(x):
    """A C-contiguous array as a vector that shares its memory."""
    return x if x.ndim == 1 else x.reshape(-1)


def others(comm):
    """All ranks but mine."""
    return [rank for rank in range(comm.size) if rank != comm.rank]
