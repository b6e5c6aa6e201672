"""Algorithms side by side: groups, streams, memory, MPI's own results, and the choice."""
import tracemalloc
from functools import partial
from itertools import product

import numpy as np
import pytest

from minidist import collectives, cost
from minidist.collectives import choice, halving, layouts, ring
from minidist.collectives.choice import ALGORITHMS, AUTOMATIC, chosen
from minidist.cost import chunks
from minidist.ranks.comm import run_threads
from tests.mpi import mpi
from tests.nodes import two_nodes


def test_two_groups_do_not_interfere():
    """Rows and columns of a grid in turn, some ranks far ahead of others."""
    def body(comm):
        groups = [comm.split(comm.rank // 3, name="row"), comm.split(comm.rank % 3, name="column")]
        sums = [3 * (comm.rank // 3 * 3) + 3, 2 * (comm.rank % 3) + 3]
        for step in range(30):
            name = AUTOMATIC["all_reduce"][step % 3]
            x = np.full(7, float(comm.rank))
            got = collectives.all_reduce(x, groups[step % 2], algorithm=name)
            assert (got == sums[step % 2]).all()
    run_threads(6, body)


def test_background_stream_and_main_thread_at_once():
    def body(comm):
        two_nodes(comm)
        stream = comm.stream()
        for name in ALGORITHMS["all_reduce"]:
            reduce = partial(collectives.all_reduce, algorithm=name)
            xs = [np.full(500, k + comm.rank, "float64") for k in range(4)]
            works = [stream.submit(reduce, x) for x in xs]
            mine = [reduce(x, comm) for x in xs]
            for k, (work, result) in enumerate(zip(works, mine)):
                assert (work.wait() == 4 * k + 6).all() and (result == 4 * k + 6).all()
    run_threads(4, body)


# --- Memory: after the first call, only the kept scratch is used. ---

@pytest.mark.parametrize("p", [4, 3])
def test_no_memory_per_call(p):
    n = 1 << 18                 # half a piece is 128 KB; Python's own objects take 15 to 43 KB

    def body(comm):
        two_nodes(comm)
        calls = list(calls_into_kept_arrays(comm, n))
        for call in calls:
            call()
        comm.barrier()
        tracemalloc.start()                     # of all thread ranks together
        comm.barrier()
        for call in calls:
            call()
        comm.barrier()
        return tracemalloc.get_traced_memory()[1]

    try:
        assert max(run_threads(p, body, sync=True)) < 4 * n / p / 2     # half a piece
    finally:
        tracemalloc.stop()


def calls_into_kept_arrays(comm, n):
    p, sizes = comm.size, chunks(n, comm.size)
    x, out, piece = np.ones(n, "f4"), np.ones(n, "f4"), np.ones(sizes[comm.rank], "f4")
    rows, came = np.ones((p, n // p), "f4"), np.ones((p, n // p), "f4")
    for name in ALGORITHMS["all_reduce"]:
        yield partial(collectives.all_reduce, x, comm, out=out, algorithm=name)
    for name in ALGORITHMS["reduce_scatter"]:
        yield partial(collectives.reduce_scatter, x, comm, out=piece, algorithm=name)
    for name in ALGORITHMS["all_gather"]:
        yield partial(collectives.all_gather, piece, comm, sizes=sizes, out=out, algorithm=name)
    for name in ALGORITHMS["all_to_all"]:
        yield partial(collectives.all_to_all, rows, comm, out=came, algorithm=name)
    for name in ALGORITHMS["broadcast"]:
        yield partial(collectives.broadcast, x, comm, out=out, algorithm=name)


# --- Under MPI, beside MPI's own collectives. ---

@mpi(8)
def test_mpi_gives_the_same(comm):
    """Every number with every type, in one of three cuttings: 8; 1 3 4; 2 2 2 2."""
    for i, color in enumerate([0, (comm.rank > 0) + (comm.rank > 3), comm.rank // 2]):
        group = comm.split(color)
        for j, n in enumerate([0, 1, group.size - 1, group.size + 1, 1000, 70_000]):
            beside_mpi(group, n, ("float32", "float64", "int64")[(i + j) % 3])


@mpi(4, MINIDIST_SYNC="1")
def test_mpi_with_synchronous_sends(comm):
    for n in 3, 5, 300_000:
        beside_mpi(comm, n, "float32")


@mpi(3, MINIDIST_PIECE="4000")
def test_messages_cut_into_pieces(comm):
    """As messages over 2 GB are; here over 4000 bytes."""
    for n in 2999, 3000, 3001, 7500:
        beside_mpi(comm, n, "float32")


@mpi(4, MINIDIST_CHECK="1")
def test_calls_that_do_not_match_are_refused_on_all_ranks(comm):
    beside_mpi(comm, 100, "float32")
    x = np.ones(100 + (comm.rank == 2))
    with pytest.raises(ValueError, match="do not make the same call.*101"):
        collectives.all_reduce(x, comm, algorithm="ring")


@mpi(4, MPIR_CVAR_NUM_CLIQUES="2")
def test_two_nodes_of_two(comm):
    beside_mpi(comm, 1001, "float32")
    node, rail, rails = choice.GROUPS[comm]
    if "MPICH" in type(comm.plain.bare.mpi).__module__ or node.size == 2:
        with comm.counting() as count:
            collectives.all_reduce(np.ones(1001, "f4"), comm, algorithm="hierarchical")
        price = cost.hierarchical([2, 2], 1001, 4, 2 * (node.ranks[0] > 0) + node.rank)
        assert (count.messages, count.bytes) == price[1:]


def beside_mpi(comm, n, dtype):
    """Compare every algorithm with MPI's own collective, bitwise, on whole numbers."""
    its, p = comm.plain.bare.mpi, comm.size
    x = np.random.default_rng([comm.rank, n]).integers(-9, 10, n).astype(dtype)
    sizes = chunks(n, p)
    total, piece, whole = x.copy(), np.empty(sizes[comm.rank], dtype), np.empty(n, dtype)
    its.Allreduce(x, total)
    its.Reduce_scatter(x, piece, sizes)
    its.Allgatherv(piece, [whole, sizes])
    for name in ALGORITHMS["all_reduce"]:
        assert (collectives.all_reduce(x, comm, algorithm=name) == total).all(), name
    for name in ALGORITHMS["reduce_scatter"]:
        assert (collectives.reduce_scatter(x, comm, algorithm=name) == piece).all(), name
    for name in ALGORITHMS["all_gather"]:
        got = collectives.all_gather(piece, comm, sizes=sizes, algorithm=name)
        assert (got == whole).all(), name
    rows = x[:n // p * p].reshape(p, n // p)
    came = np.empty_like(rows)
    its.Alltoall(rows, came)
    for name in ALGORITHMS["all_to_all"]:
        assert (collectives.all_to_all(rows, comm, algorithm=name) == came).all(), name
    sent = x.copy()
    its.Bcast(sent, p - 1)
    for name in ALGORITHMS["broadcast"]:
        assert (collectives.broadcast(x, comm, p - 1, algorithm=name) == sent).all(), name


# --- The choice. ---

def test_choice_is_the_least_predicted_time_and_known_by_name():
    for collective, names in AUTOMATIC.items():
        assert set(names) <= set(ALGORITHMS[collective])
        for p in range(1, 34):
            for nbytes in 0, 8, 10 ** 3, 10 ** 5, 10 ** 7, 10 ** 9:
                assert chosen(collective, nbytes, p) in names


def test_choice_goes_from_few_steps_to_few_bytes():
    for p in 4, 6, 8, 16, 33:
        assert chosen("all_reduce", 8, p) == "recursive_doubling"
        assert chosen("all_gather", 8 * p, p) == ("pairwise" if p == 6 else "doubling")
        assert chosen("reduce_scatter", 8 * p, p) == ("pairwise" if p == 6 else "halving")
        assert chosen("reduce_scatter", 10 ** 9, p) == "pairwise"
    assert chosen("all_reduce", 10 ** 9, 6) == "ring"            # folding would send all once more


def test_the_choice_goes_by_the_bytes_of_the_full_array():
    """Float64 on 4 ranks, just below and above the crossover: the messages tell which it was."""
    def body(comm):
        sent = []
        for collective, n in product((collectives.all_reduce, collectives.reduce_scatter),
                                     (20_000, 40_000, 100_000)):
            with comm.counting() as count:
                collective(np.zeros(n), comm)
            price = getattr(cost, collective.__name__)
            name, sizes = chosen(collective.__name__, 8 * n, 4), chunks(n, 4)
            args = (4, n) if collective is collectives.all_reduce else (sizes,)
            assert (count.messages, count.bytes) == price(name, *args, 8, comm.rank)[1:]
            sent.append(count.messages)
        return sent
    assert run_threads(4, body) == [[2, 2, 4, 2, 3, 3]] * 4


def test_what_is_worked_out_per_shape_is_bounded():
    """Experts send other sizes in every step: caches by shape must not grow with them."""
    kept = layouts.plan, layouts.layout, ring.spans, halving.role_of, choice.chosen
    assert all(function.cache_info().maxsize for function in kept)


@pytest.mark.parametrize("sizes", [[2.0, 2.0], [5, -1], [3, 2], [4]])
def test_sizes_that_cut_nothing_are_refused_and_not_remembered(sizes):
    def body(comm):
        for call in collectives.reduce_scatter, collectives.all_gather:
            with pytest.raises((TypeError, ValueError)):
                call(np.ones(4), comm, sizes=sizes)
        return collectives.reduce_scatter(np.ones(4), comm, sizes=[2, 2]).tolist()
    assert run_threads(2, body) == [[2.0, 2.0]] * 2
