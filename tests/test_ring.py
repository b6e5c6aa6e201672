"""The ring: who owns which chunk, and in which order each chunk was added."""
from functools import reduce

import numpy as np
import pytest

from minidist.collectives import ring
from minidist.cost import chunks
from minidist.ranks.comm import run_threads

RANKS = 1, 2, 3, 4, 5, 8
LENGTHS = 0, 1, 3, 5, 12, 1000


def vector(rank, n):
    return np.random.default_rng([rank, n]).standard_normal(n).astype("float32")


def in_ring_order(xs, c):
    """x_(c+1) + x_(c+2) + ... + x_c, as chunk c meets the ranks."""
    p = len(xs)
    return reduce(np.add, [xs[(c + 1 + i) % p] for i in range(p)])


@pytest.mark.parametrize("p", RANKS)
def test_each_chunk_is_the_sum_in_the_order_of_its_way(p):
    def body(comm):
        for n in LENGTHS:
            x = vector(comm.rank, n)
            ring.all_reduce(x, comm)
            parts = [ring.cut(vector(r, n), chunks(n, p)) for r in range(p)]
            expected = [in_ring_order([part[c] for part in parts], c) for c in range(p)]
            assert x.tobytes() == np.concatenate(expected).tobytes()
    run_threads(p, body)


@pytest.mark.parametrize("p", RANKS)
def test_reduce_scatter_leaves_chunk_r_on_rank_r(p):
    def body(comm):
        for n in LENGTHS:
            x = np.arange(n) * (comm.rank + 1)
            pieces = ring.cut(x, chunks(n, p))
            ring.reduce_scatter(pieces, comm)
            total = np.arange(n) * sum(range(1, p + 1))
            assert np.array_equal(pieces[comm.rank], np.array_split(total, p)[comm.rank])
    run_threads(p, body)


@pytest.mark.parametrize("p", RANKS)
def test_all_gather_fills_what_is_missing(p):
    def body(comm):
        lengths = [(3 * r) % 5 for r in range(p)]               # some of them zero
        x = np.full(sum(lengths), -1)
        pieces = ring.cut(x, lengths)
        pieces[comm.rank][...] = comm.rank
        ring.all_gather(pieces, comm)
        assert x.tolist() == [r for r in range(p) for _ in range(lengths[r])]
    run_threads(p, body)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_works_when_sends_wait_for_receives(p):
    def body(comm):
        x = np.full(100_000, comm.rank + 1.)
        ring.all_reduce(x, comm)
        assert (x == sum(range(1, p + 1))).all()
    run_threads(p, body, sync=True)


def test_cut_gives_views_one_after_the_other():
    x = np.arange(10)
    pieces = ring.cut(x, [4, 0, 3, 3])
    assert [piece.tolist() for piece in pieces] == [[0, 1, 2, 3], [], [4, 5, 6], [7, 8, 9]]
    pieces[2][0] = -1
    assert x[4] == -1


@pytest.mark.parametrize("n, p", [(0, 3), (1, 4), (5, 4), (12, 4), (1000, 7)])
def test_chunks_follow_array_split(n, p):
    assert chunks(n, p) == [part.size for part in np.array_split(np.empty(n), p)]
