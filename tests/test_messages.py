"""Every rank of every algorithm sends exactly what cost predicts, in as many steps."""
import numpy as np
import pytest

from minidist import collectives, cost
from minidist.collectives.choice import ALGORITHMS, GROUPS
from minidist.cost import chunks
from minidist.ranks.comm import run_threads
from tests.nodes import two_nodes

EXCHANGES = "send", "recv", "sendrecv", "exchange"


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 33])
def test_every_count_is_as_predicted(p):
    run_threads(p, check_counts)


def check_counts(comm):
    nodes = two_nodes(comm)
    for n in sorted({0, 1, comm.size - 1, comm.size, comm.size + 1, 1000}):
        x, sizes = np.zeros(n, "float32"), chunks(n, comm.size)
        all_reduce_counts(comm, x, nodes)
        piece_counts(comm, x, sizes)
        for root in {0, comm.size // 2}:
            rooted_counts(comm, x, sizes, root)
        all_to_all_counts(comm, n)


def all_reduce_counts(comm, x, nodes):
    for name in ALGORITHMS["all_reduce"]:
        price = (cost.hierarchical(nodes, x.size, 4, comm.rank) if name == "hierarchical" else
                 cost.all_reduce(name, comm.size, x.size, 4, comm.rank))
        check(comm, price, collectives.all_reduce, x, comm, algorithm=name)


def piece_counts(comm, x, sizes):
    r = comm.rank
    for name in ALGORITHMS["reduce_scatter"]:
        check(comm, cost.reduce_scatter(name, sizes, 4, r),
              collectives.reduce_scatter, x, comm, algorithm=name)
    for name in ALGORITHMS["all_gather"]:
        check(comm, cost.all_gather(name, sizes, 4, r),
              collectives.all_gather, x[:sizes[r]], comm, sizes=sizes, algorithm=name)


def rooted_counts(comm, x, sizes, root):
    p, n, r = comm.size, x.size, comm.rank
    for name in ALGORITHMS["broadcast"]:
        check(comm, cost.broadcast(name, p, n, 4, r, root),
              collectives.broadcast, x, comm, root, algorithm=name)
    for name in ALGORITHMS["reduce"]:
        check(comm, cost.reduce(name, p, n, 4, r, root),
              collectives.reduce, x, comm, root, algorithm=name)
    check(comm, cost.scatter(sizes, 4, r, root), collectives.scatter, x, comm, root)
    check(comm, cost.gather(sizes, 4, r, root), collectives.gather, x[:sizes[r]], comm, root, sizes)


def all_to_all_counts(comm, n):
    p, r = comm.size, comm.rank
    for name in ALGORITHMS["all_to_all"]:
        check(comm, cost.all_to_all(name, [n // p] * p, 4, r),
              collectives.all_to_all, np.zeros((p, n // p), "float32"), comm, algorithm=name)
    uneven = [np.zeros(t + 2 * r, "float32") for t in range(p)]
    check(comm, cost.all_to_all("pairwise", [t + 2 * r for t in range(p)], 4, r),
          collectives.all_to_all, uneven, comm, shapes=[(r + 2 * s,) for s in range(p)])


def check(comm, price, fn, *args, **kwargs):
    """Demand that the call costs exactly this; its steps are the calls of send, recv, sendrecv,
    and the moves of an exchange (which makes one of them a sendrecv)."""
    groups = [comm, *(group for group in GROUPS.get(comm, ())[:2] if group is not None)]
    calls = []
    for group in groups:
        for name in EXCHANGES:
            setattr(group, name, noting(getattr(group, name), calls))
    with comm.counting() as count:
        fn(*args, **kwargs)
    for group in groups:
        for name in EXCHANGES:
            delattr(group, name)
    assert (len(calls), count.messages, count.bytes) == price, (fn.__name__, kwargs, comm)


def noting(method, calls):
    def call(*args, **kwargs):
        if method.__name__ != "exchange":
            calls.append(method)
        elif len(args[0]) > 1:
            calls.extend(args[0])
        return method(*args, **kwargs)
    return call
