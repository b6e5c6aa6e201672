"""Every algorithm, any number of ranks, any length, stride and type: the serial answer, bitwise."""
import numpy as np
import pytest

from minidist import collectives
from minidist.collectives.choice import ALGORITHMS
from minidist.cost import chunks
from minidist.ranks.comm import run_threads
from tests.nodes import two_nodes

DTYPES = "float32", "float64", "float16", "int64", "int32"
OPS = {"sum": np.add, "max": np.maximum}


def lengths(p):
    return sorted({0, 1, p - 1, p, p + 1, 1000} if p <= 16 else {p - 1, 1000})


def whole_numbers(rank, n, dtype):
    """Integer values: any order of adding gives the same bits."""
    return np.random.default_rng([rank, n]).integers(-9, 10, n).astype(dtype)


def random_floats(rank, n, dtype="float32"):
    return np.random.default_rng([rank, n]).standard_normal(n).astype(dtype)


def same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert a.tobytes() == b.tobytes()


# --- Values: equal to the serial answer, bitwise. ---

@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 33])
def test_every_algorithm_gives_the_serial_answer(p):
    run_threads(p, check_values, DTYPES if p <= 8 else DTYPES[:1])


@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_every_algorithm_with_synchronous_sends(p):
    run_threads(p, check_values, DTYPES[:1], sync=True)


def check_values(comm, dtypes):
    two_nodes(comm)
    for dtype in dtypes:
            for n in lengths(comm.size):
                xs = [whole_numbers(r, n, dtype) for r in range(comm.size)]
                for op in OPS if dtype == "int32" else ["sum"]:
                    check_reductions(comm, xs, op)
                check_moves(comm, xs)
                check_all_to_all(comm, n, dtype)


def check_reductions(comm, xs, op):
    x, total = xs[comm.rank].copy(), OPS[op].reduce(xs, dtype=xs[0].dtype)
    piece = np.array_split(total, comm.size)[comm.rank]
    root = comm.size // 2
    for name in ALGORITHMS["all_reduce"]:
        same(collectives.all_reduce(x, comm, op, algorithm=name), total)
    for name in ALGORITHMS["reduce_scatter"]:
        same(collectives.reduce_scatter(x, comm, op=op, algorithm=name), piece)
    for name in ALGORITHMS["reduce"]:
        got = collectives.reduce(x, comm, root, op, algorithm=name)
        assert got is None if comm.rank != root else got.tobytes() == total.tobytes()
    same(x, xs[comm.rank])                                              # left as it was


def check_moves(comm, xs):
    p, r, root = comm.size, comm.rank, comm.size - 1
    x, sizes = xs[r], chunks(xs[0].size, p)
    piece = np.array_split(xs[root], p)[r].copy()
    for name in ALGORITHMS["broadcast"]:
        same(collectives.broadcast(x, comm, root, algorithm=name), xs[root])
    for name in ALGORITHMS["all_gather"]:
        same(collectives.all_gather(piece, comm, sizes=sizes, algorithm=name), xs[root])
    same(collectives.scatter(x, comm, root), piece)
    whole = collectives.gather(piece, comm, root, sizes)
    assert whole is None if r != root else whole.tobytes() == xs[root].tobytes()


def check_all_to_all(comm, n, dtype):
    p, r = comm.size, comm.rank
    sent = [[whole_numbers(100 * s + t, n // p, dtype) for t in range(p)] for s in range(p)]
    for name in ALGORITHMS["all_to_all"]:
        for got, source in zip(collectives.all_to_all(sent[r], comm, algorithm=name), sent):
            same(got, source[r])
    uneven = [np.full(t + 2 * r, 10 * r + t, dtype) for t in range(p)]
    got = collectives.all_to_all(uneven, comm, shapes=[(r + 2 * s,) for s in range(p)])
    for s in range(p):
        same(got[s], np.full(r + 2 * s, 10 * s + r, dtype))


@pytest.mark.parametrize("p", [2, 3, 4, 6, 7, 8])
def test_all_ranks_agree_bitwise_on_random_floats(p):
    def body(comm):
        two_nodes(comm)
        x = random_floats(comm.rank, 1000)
        return [collectives.all_reduce(x, comm, algorithm=name).tobytes()
                for name in ALGORITHMS["all_reduce"]]
    results = run_threads(p, body)
    assert all(result == results[0] for result in results)
    assert len(set(results[0])) > 1 or p == 2               # they add in different orders


@pytest.mark.parametrize("name", ["ring", "halving"])
def test_reduce_scatter_then_all_gather_is_all_reduce(name):
    both = {"ring": ("ring", "ring"), "halving": ("doubling", "halving_doubling")}[name]

    def body(comm):
        x = random_floats(comm.rank, 1003)
        piece = collectives.reduce_scatter(x, comm, algorithm=name)
        sizes = chunks(1003, comm.size)
        whole = collectives.all_gather(piece, comm, sizes=sizes, algorithm=both[0])
        same(whole, collectives.all_reduce(x, comm, algorithm=both[1]))
    for p in 1, 2, 3, 4, 6, 8:
        run_threads(p, body)


# --- Any strides, shapes and out=. ---

@pytest.mark.parametrize("p", [1, 2, 3])
def test_strided_inputs(p):
    def body(comm):
        base = np.arange(24.).reshape(4, 6) * (comm.rank + 1)
        total = np.arange(24.).reshape(4, 6) * sum(range(1, p + 1))
        views = (lambda a: a.T, lambda a: a[:, ::2], np.asfortranarray, lambda a: a[1:1],
                 lambda a: np.broadcast_to(a[0, 1], (3, 2)), lambda a: a[2, 3, ...])
        for view in views:
            x, expected = view(base), np.ascontiguousarray(view(total))
            for name in ALGORITHMS["all_reduce"]:
                same(collectives.all_reduce(x, comm, algorithm=name), expected.reshape(x.shape))
            same(collectives.broadcast(x, comm), np.array(view(base / (comm.rank + 1))))
            root = collectives.reduce(x, comm)
            assert root is None or (root == expected).all()
        column, whole = base[:, 1], total[:, 1]                         # a vector with gaps
        sizes = chunks(4, p)
        for name in ALGORITHMS["reduce_scatter"]:
            piece = collectives.reduce_scatter(column, comm, algorithm=name)
            same(piece, np.array_split(whole, p)[comm.rank].copy())
        for name in ALGORITHMS["all_gather"]:
            same(collectives.all_gather(np.repeat(piece, 2)[::2], comm, sizes=sizes,
                                        algorithm=name), whole.copy())
        for name in ALGORITHMS["all_to_all"]:
            rows = np.arange(6. * p).reshape(p, 6) + comm.rank
            got = collectives.all_to_all(rows[:, ::2], comm, algorithm=name)
            same(got, np.arange(6. * p).reshape(p, 6)[[comm.rank] * p, ::2] + np.arange(p)[:, None])
    run_threads(p, body)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_pieces_along_any_dim(p, dim):
    def body(comm):
        full = np.arange(5 * 6 * 7.).reshape(5, 6, 7)
        x = (full * (comm.rank + 1)).T.copy().T                         # Fortran order
        sizes = [1] * (p - 1) + [full.shape[dim] - (p - 1)]
        for given in sizes, None:
            cuts = np.cumsum(given or chunks(full.shape[dim], p))[:-1]
            expected = np.split(full * sum(range(1, p + 1)), cuts, dim)
            for name in ALGORITHMS["reduce_scatter"]:
                piece = collectives.reduce_scatter(x, comm, dim, given, algorithm=name)
                same(piece, np.ascontiguousarray(expected[comm.rank]))
            lens = [e.shape[dim] for e in expected]
            for name in ALGORITHMS["all_gather"]:
                whole = collectives.all_gather(piece, comm, dim, lens, algorithm=name)
                same(whole, full * sum(range(1, p + 1)))
    run_threads(p, body)


def test_scatter_and_gather_rows():
    def body(comm):
        x = np.arange(12.).reshape(6, 2).T.copy().T if comm.rank == 1 else np.empty((6, 2))
        mine = collectives.scatter(x, comm, root=1, sizes=[3, 1, 2])
        whole = collectives.gather(mine, comm, root=2, sizes=[3, 1, 2])
        return mine.tolist(), None if whole is None else whole.tolist()
    results = run_threads(3, body)
    full = np.arange(12.).reshape(6, 2).tolist()
    assert [mine for mine, _ in results] == [full[:3], full[3:4], full[4:]]
    assert [whole for _, whole in results] == [None, None, full]


def test_out_takes_the_result():
    def body(comm):
        x = random_floats(comm.rank, 12).reshape(3, 4)
        kept, out = x.copy(), np.empty((3, 4), "float32")
        total = collectives.all_reduce(x, comm)
        assert collectives.all_reduce(x, comm, out=out) is out
        same(out, total)
        same(x, kept)
        assert collectives.all_reduce(x, comm, out=x) is x              # in place
        same(x, total)
        piece = np.empty((1, 4), "float32")
        assert collectives.reduce_scatter(kept, comm, out=piece) is piece
        assert collectives.all_gather(piece, comm, out=out) is out
        same(out, total)
        rows = [np.empty(4, "float32") for _ in range(3)]
        got = collectives.all_to_all(list(x), comm, out=rows)
        assert all(a is b for a, b in zip(got, rows))
        assert all(np.shares_memory(a, out) for a in collectives.all_to_all(x, comm, out=out))
        same(out, np.stack(rows))
    run_threads(3, body)


# --- Refused by name, on every rank, before any message. ---

@pytest.mark.parametrize("message, call", [
    ("out is float64", lambda x, c: collectives.all_reduce(x, c, out=np.empty(6))),
    ("not C-contiguous", lambda x, c: collectives.all_reduce(
        x.reshape(2, 3), c, out=np.empty((3, 2), x.dtype).T)),
    ("unknown op 'mean'", lambda x, c: collectives.all_reduce(x, c, "mean")),
    ("no algorithm 'rings'", lambda x, c: collectives.all_reduce(x, c, algorithm="rings")),
    ("with sum 6", lambda x, c: collectives.reduce_scatter(x, c, sizes=[3, 4])),
    ("one per rank", lambda x, c: collectives.reduce_scatter(x, c, sizes=[6])),
    ("holds a piece of 6", lambda x, c: collectives.all_gather(x, c, sizes=[5, 5])),
    ("holds a piece of 6", lambda x, c: collectives.gather(x, c, sizes=[5, 5])),
    ("with sum 6", lambda x, c: collectives.scatter(x, c, sizes=[1, 1])),
    ("has 3 pieces", lambda x, c: collectives.all_to_all([x] * 3, c)),
    ("has 3 pieces", lambda x, c: collectives.all_to_all(x.reshape(3, 2), c)),
    (r"keeps its piece of \[6\], but shapes says \[2, 3\]", lambda x, c: collectives.all_to_all(
        [x, x], c, shapes=[(2, 3)] * 2)),
    ("equal pieces", lambda x, c: collectives.all_to_all([x, x[1:]], c, algorithm="bruck")),
    ("foreign byte order", lambda x, c: collectives.all_reduce(x.astype(">f4"), c)),
])
def test_refusals(message, call):
    def body(comm):
        with comm.counting() as count:
            with pytest.raises((ValueError, TypeError), match=message):
                call(np.arange(6, dtype="float32"), comm)
        assert count.messages == 0
    run_threads(2, body)
