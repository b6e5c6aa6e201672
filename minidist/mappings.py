"""Differentiable collectives: where gradients and ranks meet inside a tape.

Seen across a group of ranks, an array is one of three things:

    replicated    one value, held by every rank                    counts once
    varying       each rank has its own value, or part of a sum    summed over ranks
    sharded       each rank has its piece of one array             summed over ranks

A collective takes it from one to another, and its backward is its adjoint: <v, A x> = <A* v, x>,
in the inner product that counts a replicated array once and sums the other two over the ranks.

    forward            from -> to                  backward
    copy_to            replicated -> varying       all_reduce
    reduce_from        varying -> replicated       nothing to do
    all_gather         sharded -> varying          reduce_scatter
    reduce_scatter     varying -> sharded          all_gather
    split              replicated -> sharded       gather
    gather             sharded -> replicated       split
    all_to_all         sharded -> sharded          all_to_all, the other way
    send, recv         one rank -> another         recv, send

Why does reduce_from need no message backward, and copy_to none forward?  Because each is the
other's adjoint.  And one all_gather has two backwards, because it has two meanings.  Where each
rank goes on to use the gathered array in its own way (all_gather), every rank owes it a gradient,
and the parts are summed.  Where the array is merely complete now (gather), its one gradient is
known to everybody.

Every function here is collective: all ranks of the group call it, and all call backward.

Lesson: mpirun -n 4 python -m lessons.tp
Paper:  Shoeybi et al. 2019, "Megatron-LM", section 3 (copy_to is its f, reduce_from its g)
"""
import numpy as np

from minidist import collectives
from minidist.cost import chunks
from minidist.engine.tensor import Tensor


def copy_to(x, comm):
    """f: the same x on every rank; its gradient is the sum of what each rank did with it."""
    return Tensor(x.data, (x,), lambda g: (collectives.all_reduce(g, comm),))


def reduce_from(x, comm):
    """g: partial results in, their sum out; each part's gradient is the sum's gradient."""
    return Tensor(collectives.all_reduce(x.data, comm), (x,), lambda g: (g,))


def all_gather(x, comm, dim, sizes=None):
    """Pieces in, the whole out, for each rank to use in its own way.  [n/p] -> [n]

    sizes: the length of each rank's piece along dim; all as mine when not given."""
    sizes = sizes or [x.shape[dim]] * comm.size
    whole = collectives.all_gather(x.data, comm, dim, sizes)
    return Tensor(whole, (x,), lambda g: (collectives.reduce_scatter(g, comm, dim, sizes),))


def reduce_scatter(x, comm, dim, sizes=None):
    """Partial results in, my piece of their sum out.  [n] -> [n/p]

    sizes: the length of each rank's piece along dim; as np.array_split when not given."""
    sizes = sizes or chunks(x.shape[dim], comm.size)
    mine = collectives.reduce_scatter(x.data, comm, dim, sizes)
    return Tensor(mine, (x,), lambda g: (collectives.all_gather(g, comm, dim, sizes),))


def split(x, comm, dim, sizes=None):
    """Keep my piece of what everybody has.  No message forward.  [n] -> [n/p]"""
    sizes = sizes or chunks(x.shape[dim], comm.size)
    mine = collectives.split(x.data, dim, sizes)[comm.rank].copy()  # a view would keep all alive
    return Tensor(mine, (x,), lambda g: (collectives.all_gather(g, comm, dim, sizes),))


def gather(x, comm, dim, sizes=None):
    """Pieces in, the whole out, one and the same for all.  No message backward.  [n/p] -> [n]"""
    sizes = sizes or [x.shape[dim]] * comm.size
    whole = collectives.all_gather(x.data, comm, dim, sizes)
    return Tensor(whole, (x,), lambda g: (collectives.split(g, dim, sizes)[comm.rank],))


def all_to_all(x, comm, apart, together, send=None, receive=None):
    """Take x apart along one dimension, a piece for each rank; put together what arrives.

    send[s]: the length along `apart` of what goes to rank s; as np.array_split when not given.
    receive[s]: the length along `together` of what comes from s; all as mine when not given."""
    send = send or chunks(x.shape[apart], comm.size)
    own = send[comm.rank] if apart == together else x.shape[together]
    receive = receive or [own] * comm.size
    y = exchange(x.data, comm, apart, together, send, receive)
    return Tensor(y, (x,), lambda g: (exchange(g, comm, together, apart, receive, send),))


def send(x, comm, to):
    """Hand x to one rank.  Returns an empty token: call its backward to receive x's gradient."""
    comm.send(np.ascontiguousarray(x.data), to)
    shape, dtype = x.shape, x.dtype
    return Tensor(np.empty(0, dtype), (x,), lambda g: (comm.recv(np.empty(shape, dtype), to),))


def recv(shape, dtype, comm, source):
    """Take an array from one rank; backward sends its gradient back there."""
    def give_back(g):
        comm.send(np.ascontiguousarray(g), source)
        return (None,)

    start = Tensor(np.empty(0, dtype), requires_grad=True)     # a tape begins here, on this rank
    return Tensor(comm.recv(np.empty(shape, dtype), source), (start,), give_back)


def exchange(x, comm, apart, together, send, receive):
    """Take a plain array apart along one dimension and put together along another."""
    def shape_from(rank):
        shape = list(x.shape)
        shape[apart] = send[comm.rank]
        shape[together] = receive[rank]                        # apart and together may be the same
        return tuple(shape)

    shapes = [shape_from(rank) for rank in range(comm.size)]
    arrived = collectives.all_to_all(collectives.split(x, apart, send), comm, shapes)
    return np.concatenate(arrived, together)
