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

Inputs are left as they are, may have any strides, and keep dtype and shape.  All functions are
collective: every rank of the group calls them, in the same order, with the same keywords.

Lesson: mpirun -n 4 python -m lessons.collectives
"""
from functools import cache
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np

from minidist import alltoall, double_tree, halving, hierarchical, ring, tree
from minidist.cost import chunks
from minidist.ring import cut

GROUPS = WeakKeyDictionary()            # comm -> its node's and its rail's group, formed once
OPS = {"sum": np.add, "max": np.maximum}

# Each looks its function up when called, so that a reader's own can stand in for the module's.
ALGORITHMS = {
    "all_reduce": {
        "naive": lambda *args: tree.naive_all_reduce(*args),
        "tree": lambda *args: tree.all_reduce(*args),
        "recursive_doubling": lambda *args: tree.recursive_doubling(*args),
        "halving_doubling": lambda *args: halving.all_reduce(*args),
        "ring": lambda *args: ring.all_reduce(*args),
        "double_tree": lambda *args: double_tree.all_reduce(*args),
        "hierarchical": lambda x, comm, op: hierarchical.all_reduce(x, node_groups(comm), op),
    },
    "reduce_scatter": {
        "halving": lambda *args: halving.reduce_scatter(*args),
        "ring": lambda x, sizes, *args: ring.reduce_scatter(cut(x, sizes), *args),
    },
    "all_gather": {
        "doubling": lambda *args: halving.all_gather(*args),
        "ring": lambda x, sizes, comm: ring.all_gather(cut(x, sizes), comm),
    },
    "broadcast": {
        "naive": lambda *args: tree.naive_broadcast(*args),
        "tree": lambda *args: tree.broadcast(*args),
    },
    "reduce": {
        "naive": lambda *args: tree.naive_reduce(*args),
        "tree": lambda *args: tree.reduce(*args),
    },
    "all_to_all": {
        "pairwise": lambda *args: alltoall.pairwise(*args),
        "bruck": lambda *args: alltoall.bruck(*args),
    },
}


@cache
def chosen(collective, nbytes, p):
    """Name the algorithm that the automatic choice takes, for nbytes (of the full array) on p ranks."""
    if collective == "all_reduce":
        return "recursive_doubling" if nbytes <= 32768 or p == 1 else "ring"
    return {"broadcast": "tree", "reduce": "tree", "all_to_all": "pairwise"}.get(collective, "ring")


def all_reduce(x, comm, op="sum", out=None, algorithm=None):
    """Sum (or max) over ranks.  any shape -> same shape

    out: the array that takes the result, x itself for in place; it must be C-contiguous."""
    out = target(x, out)
    run("all_reduce", algorithm, out.nbytes, comm, out.reshape(-1), comm, function(op))
    return out


def reduce_scatter(x, comm, dim=0, sizes=None, op="sum", out=None, algorithm=None):
    """Sum over ranks and keep piece r of the result along dim.  [n] -> [n/p]

    sizes: the length of each rank's piece, by default as np.array_split cuts."""
    x = np.asarray(x)
    sizes = checked(sizes or chunks(x.shape[dim], comm.size), x.shape[dim], comm)
    pieces = [np.array(piece, order="C") for piece in split(x, dim, sizes)]
    work = np.concatenate([piece.reshape(-1) for piece in pieces])
    flat = [piece.size for piece in pieces]
    run("reduce_scatter", algorithm, x.nbytes, comm, work, flat, comm, function(op))
    return cut(work, flat)[comm.rank].reshape(pieces[comm.rank].shape).copy()


def all_gather(x, comm, dim=0, sizes=None, out=None, algorithm=None):
    """Put the ranks' pieces together along dim, in rank order.  [n/p] -> [n]

    sizes: the length of each rank's piece along dim; without it, all are as long as mine."""
    x = np.asarray(x)
    sizes = sizes or [x.shape[dim]] * comm.size
    if sizes[comm.rank] != x.shape[dim]:
        raise ValueError(f"rank {comm.rank} of {comm.name} holds {x.shape[dim]} along dim {dim}, "
                         f"but sizes says {sizes[comm.rank]}")
    shapes = [replaced(x.shape, dim, size) for size in sizes]
    flat = [int(np.prod(shape)) for shape in shapes]
    work = np.empty(sum(flat), x.dtype)
    pieces = [piece.reshape(shape) for piece, shape in zip(cut(work, flat), shapes)]
    pieces[comm.rank][...] = x
    run("all_gather", algorithm, work.nbytes, comm, work, flat, comm)
    return np.concatenate(pieces, axis=dim)


def broadcast(x, comm, root=0, algorithm=None):
    """Give every rank the root's array.  any shape -> same shape

    On the other ranks only the shape and dtype of x matter."""
    out = target(x, None)
    run("broadcast", algorithm, out.nbytes, comm, out.reshape(-1), comm, root)
    return out


def reduce(x, comm, root=0, op="sum", algorithm=None):
    """Sum (or max) over ranks; the result on root, None elsewhere.  any shape -> same shape"""
    out = target(x, None)
    run("reduce", algorithm, out.nbytes, comm, out.reshape(-1), comm, root, function(op))
    return out if comm.rank == root else None


def scatter(x, comm, root=0, sizes=None):
    """Give rank r piece r (along the first dimension) of the root's array.  [n, ...] -> [n/p, ...]

    On the other ranks only the shape and dtype of x matter."""
    x = np.asarray(x)
    sizes = checked(sizes or chunks(len(x), comm.size), len(x), comm)
    pieces = split(x, 0, sizes)
    mine = np.array(pieces[comm.rank], order="C")
    with comm.operation("scatter", None):
        if comm.rank != root:
            comm.recv(mine, source=root)
        else:
            for rank in tree.others(comm, root):
                comm.send(np.ascontiguousarray(pieces[rank]), rank)
    return mine


def gather(x, comm, root=0, sizes=None):
    """Put the ranks' pieces together on root, along the first dimension; None elsewhere.

    sizes: the length of each rank's piece; without it, all are as long as mine."""
    x = np.ascontiguousarray(x)
    sizes = sizes or [len(x)] * comm.size
    whole = np.empty((sum(sizes), *x.shape[1:]), x.dtype) if comm.rank == root else None
    with comm.operation("gather", None):
        if comm.rank != root:
            comm.send(x, root)
            return None
        pieces = split(whole, 0, sizes)
        pieces[root][...] = x
        for rank in tree.others(comm, root):
            comm.recv(pieces[rank], source=rank)
    return whole


def all_to_all(pieces, comm, shapes=None, algorithm=None):
    """Send pieces[s] to rank s; return what every rank sent to me.  p arrays -> p arrays

    shapes: of what I receive; without it, rank s sends me what I send it."""
    pieces = [np.ascontiguousarray(piece) for piece in pieces]
    shapes = shapes or [piece.shape for piece in pieces]
    received = [np.empty(shape, pieces[0].dtype) for shape in shapes]
    nbytes = sum(piece.nbytes for piece in pieces)
    run("all_to_all", algorithm, nbytes, comm, [piece.reshape(-1) for piece in pieces],
        [piece.reshape(-1) for piece in received], comm)
    return received


def run(collective, algorithm, nbytes, comm, *args):
    """Call the algorithm, by name or chosen by size, under the collective's label."""
    algorithm = algorithm or chosen(collective, nbytes, comm.size)
    if algorithm not in ALGORITHMS[collective]:
        raise ValueError(f"{collective} has no algorithm {algorithm!r}; "
                         f"it has {', '.join(ALGORITHMS[collective])}")
    with comm.operation(collective, algorithm):
        ALGORITHMS[collective][algorithm](*args)


def node_groups(comm):
    """My node's group and my rail, formed at the first call."""
    if comm not in GROUPS:
        GROUPS[comm] = hierarchical.groups(comm)
    return GROUPS[comm]


def function(op):
    """The NumPy function of an op's name."""
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; it is one of {', '.join(OPS)}")
    return OPS[op]


def target(x, out):
    """The contiguous array that starts as x and takes the result: out, or a copy of x."""
    if out is None:
        return np.array(x, order="C")
    if not out.flags.c_contiguous:
        raise ValueError(f"out ({out.dtype} {list(out.shape)}) is not C-contiguous: an in-place "
                         "collective could only change a copy; leave out= away and use the result")
    if out.shape != np.shape(x) or out.dtype != x.dtype:
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, "
                         f"but x is {x.dtype} {list(np.shape(x))}")
    if out is not x:
        out[...] = x
    return out


def split(x, dim, sizes):
    """Views of consecutive pieces of x along dim."""
    return np.split(x, list(accumulate(sizes))[:-1], axis=dim)


def checked(sizes, length, comm):
    """Sizes, if there is one per rank and they add up to length."""
    if len(sizes) != comm.size or sum(sizes) != length:
        raise ValueError(f"sizes {list(sizes)} must be {comm.size} numbers (one per rank of "
                         f"{comm.name}) with sum {length}")
    return sizes


def replaced(shape, dim, size):
    """Shape with another length along dim."""
    shape = list(shape)
    shape[dim] = size
    return tuple(shape)
