"""All-to-all: partners, Bruck's hops, uneven and empty pieces."""
import numpy as np
import pytest

from minidist.collectives import alltoall
from minidist.ranks.comm import run_threads


def test_everyone_meets_everyone_once_and_both_sides_know():
    for p in range(1, 34):
        tables = [list(alltoall.partners(r, p)) for r in range(p)]
        for r, table in enumerate(tables):
            assert sorted(to for to, _ in table) == [s for s in range(p) if s != r]
            assert sorted(source for _, source in table) == [s for s in range(p) if s != r]
            for step, (to, _) in enumerate(table):
                assert tables[to][step][1] == r                 # where I send, I am expected


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_bruck_equals_pairwise(p, n):
    def body(comm):
        pieces = np.random.default_rng(comm.rank).standard_normal((p, n))
        straight, hopping = np.empty((2, p, n))
        alltoall.pairwise(pieces, straight, comm)
        alltoall.bruck(pieces, hopping, comm)
        assert straight.tobytes() == hopping.tobytes()
        return pieces, straight
    results = run_threads(p, body)
    for r, (_, got) in enumerate(results):
        assert all(np.array_equal(got[s], results[s][0][r]) for s in range(p))


@pytest.mark.parametrize("p, hops", list(zip(
    [2, 3, 4, 5, 6, 7, 8, 16], [1, 2, 4, 5, 7, 9, 12, 32])))
def test_bruck_sends_one_piece_per_bit_of_its_way(p, hops):
    def body(comm):
        pieces = np.zeros((p, 3), "float32")
        with comm.counting() as count:
            alltoall.bruck(pieces, pieces.copy(), comm)
        assert count.messages == (p - 1).bit_length() and count.bytes == hops * 3 * 4
    run_threads(p, body)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_pieces_of_any_size_with_synchronous_sends(p):
    def body(comm):
        size = lambda s, t: (s * 7 + t * 3) % 5                 # noqa: E731  (zero for some pairs)
        pieces = [np.full(size(comm.rank, t), 10 * comm.rank + t) for t in range(p)]
        got = [np.empty(size(s, comm.rank), int) for s in range(p)]
        alltoall.pairwise(pieces, got, comm)
        for s in range(p):
            assert got[s].tolist() == [10 * s + comm.rank] * size(s, comm.rank)
    run_threads(p, body, sync=True)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_reduce_scatter_adds_what_arrives_and_leaves_the_pieces(p):
    def body(comm):
        pieces = [np.arange(4 + t) * (comm.rank + 1) for t in range(p)]
        kept = [piece.copy() for piece in pieces]
        mine = np.empty(4 + comm.rank, int)
        alltoall.reduce_scatter(pieces, mine, comm)
        assert mine.tolist() == [i * sum(range(1, p + 1)) for i in range(4 + comm.rank)]
        assert all(np.array_equal(a, b) for a, b in zip(pieces, kept))
    run_threads(p, body)
