"""Differentiable collectives: every backward is the adjoint of its forward."""
import numpy as np
import pytest

from minidist import mappings
from minidist.engine.tensor import Tensor
from minidist.ranks.comm import run_threads

UNEVEN = [3, 1, 0, 2]                                   # lengths of the pieces, by rank


def lengths(p):
    return UNEVEN[:p]


def whole(p):
    return (2, sum(lengths(p)), 3)


def piece(rank):
    return (2, UNEVEN[rank], 3)


# name: forward(x, comm), how x lies, shape of x, how y lies
def cases(comm):
    p, sizes = comm.size, lengths(comm.size)
    mine, all_of_it = piece(comm.rank), whole(p)
    there, back = [(s + comm.rank) % 3 for s in range(p)], [(s + comm.rank) % 3 for s in range(p)]
    return {
        "copy_to": (mappings.copy_to, "replicated", all_of_it, "varying"),
        "reduce_from": (mappings.reduce_from, "varying", all_of_it, "replicated"),
        "all_gather": (lambda x, c: mappings.all_gather(x, c, 1, sizes), "sharded", mine,
                       "varying"),
        "reduce_scatter": (lambda x, c: mappings.reduce_scatter(x, c, 1, sizes), "varying",
                           all_of_it, "sharded"),
        "reduce_scatter even": (lambda x, c: mappings.reduce_scatter(x, c, -1), "varying",
                                (2, 5), "sharded"),
        "split": (lambda x, c: mappings.split(x, c, 1, sizes), "replicated", all_of_it,
                  "sharded"),
        "split even": (lambda x, c: mappings.split(x, c, 0), "replicated", (7, 2), "sharded"),
        "gather": (lambda x, c: mappings.gather(x, c, 1, sizes), "sharded", mine, "replicated"),
        "gather even": (lambda x, c: mappings.gather(x, c, 0), "sharded", (2, 3), "replicated"),
        "all_gather even": (lambda x, c: mappings.all_gather(x, c, -1), "sharded", (2, 3),
                            "varying"),
        "all_to_all rows": (lambda x, c: mappings.all_to_all(x, c, 0, 0, there, back), "sharded",
                            (sum(there), 4), "sharded"),
        "all_to_all heads": (lambda x, c: mappings.all_to_all(x, c, 2, 1, receive=sizes),
                             "sharded", (2, UNEVEN[comm.rank], 5), "sharded"),
        "all_to_all even": (lambda x, c: mappings.all_to_all(x, c, 0, 1), "sharded", (5, 2),
                            "sharded"),
    }


def draw(shape, lies, comm, seed):
    """Integers, so that every order of summation gives the same bits."""
    rng = np.random.default_rng([seed, 0 if lies == "replicated" else comm.rank])
    return rng.integers(-9, 10, shape).astype(np.float64)


def inner(a, b, lies, comm):
    """Count what is replicated once; sum the rest over ranks."""
    here = np.array([np.vdot(a, b)])
    if lies != "replicated":
        here = mappings.reduce_from(Tensor(here), comm).data
    return float(here[0])


def adjoint(comm, name):
    forward, x_lies, shape, y_lies = cases(comm)[name]
    x = Tensor(draw(shape, x_lies, comm, 1), requires_grad=True)
    y = forward(x, comm)
    v = draw(y.shape, y_lies, comm, 2)
    y.backward(v.copy())
    assert x.grad.shape == x.shape and x.grad.dtype == x.dtype
    return inner(v, y.data, y_lies, comm), inner(x.grad, x.data, x_lies, comm), y.data, x.grad


NAMES = ["copy_to", "reduce_from", "all_gather", "all_gather even", "reduce_scatter",
         "reduce_scatter even", "split", "split even", "gather", "gather even",
         "all_to_all rows", "all_to_all heads", "all_to_all even"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_backward_is_the_adjoint(p, name):
    for there, back, _, _ in run_threads(p, adjoint, name):
        assert there == back


@pytest.mark.parametrize("name", NAMES)
def test_what_should_be_replicated_is(name):
    results = run_threads(3, adjoint, name)
    _, x_lies, _, y_lies = run_threads(3, lambda comm: cases(comm)[name])[0]
    for lies, values in ((y_lies, [r[2] for r in results]), (x_lies, [r[3] for r in results])):
        if lies == "replicated":
            assert all(np.array_equal(values[0], other) for other in values)


# ------------------------------------------------------------------ known numbers

def gradient(comm, forward, x, factor):
    x = Tensor(np.array(x, float), requires_grad=True)
    (forward(x, comm) * factor).sum().backward()
    return x.grad.tolist()


def test_all_gather_sums_what_every_rank_did_with_my_number():
    """Rank r's loss is (r+1) sum(y): 1 + 2 + 3 = 6 for everybody, not 3 x 6 and not r + 1."""
    def fn(comm):
        return gradient(comm, lambda x, c: mappings.all_gather(x, c, 0), [7.0], comm.rank + 1.0)
    assert run_threads(3, fn) == [[6.0]] * 3


def test_copy_to_sums_and_reduce_from_does_not():
    def copy(comm):
        return gradient(comm, mappings.copy_to, [7.0], comm.rank + 1.0)

    def reduce(comm):
        return gradient(comm, mappings.reduce_from, [7.0], 5.0)

    assert run_threads(3, copy) == [[6.0]] * 3
    assert run_threads(3, reduce) == [[5.0]] * 3


def test_gather_gives_back_one_copy():
    def fn(comm):
        return gradient(comm, lambda x, c: mappings.gather(x, c, 0), [1.0, 2.0], 5.0)
    assert run_threads(3, fn) == [[5.0, 5.0]] * 3


def test_two_ranks_one_number_by_finite_difference():
    """y = (a_0 x + a_1 x)^2: copy, multiply, sum, as a tensor-parallel layer does."""
    def loss(comm, x):
        a = Tensor(np.array(comm.rank + 2.0))
        y = mappings.reduce_from(mappings.copy_to(x, comm) * a, comm)
        return y * y

    def fn(comm):
        x = Tensor(np.array(5.0), requires_grad=True)
        loss(comm, x).backward()
        above, below = (loss(comm, Tensor(np.array(5.0 + h))).item() for h in (1e-5, -1e-5))
        return x.grad.item(), (above - below) / 2e-5

    for exact, slope in run_threads(2, fn):
        assert exact == 2 * 25 * 5
        assert abs(exact - slope) < 1e-4


def test_all_to_all_moves_each_piece_to_its_rank():
    def fn(comm):
        x = Tensor(np.arange(6.0).reshape(3, 2) + 10 * comm.rank)
        return mappings.all_to_all(x, comm, 0, 1).data.tolist()
    assert run_threads(3, fn) == [[[0, 1, 10, 11, 20, 21]], [[2, 3, 12, 13, 22, 23]],
                                  [[4, 5, 14, 15, 24, 25]]]


# ------------------------------------------------------------------ one rank to another

def send_around(comm):
    """Every even rank hands an array to the next odd one."""
    v, x = draw((2, 3), "varying", comm, 2), draw((2, 3), "varying", comm, 1)
    if comm.rank % 2 == 0:
        x = Tensor(x, requires_grad=True)
        token = mappings.send(x, comm, comm.rank + 1)
        token.backward(np.empty(0))
        return np.vdot(x.grad, x.data)
    y = mappings.recv((2, 3), np.float64, comm, comm.rank - 1)
    (y * 1.0).backward(v)
    return np.vdot(v, y.data)


@pytest.mark.parametrize("p", [2, 4])
def test_recv_is_the_adjoint_of_send(p):
    results = run_threads(p, send_around)
    assert results[::2] == results[1::2] and 0 not in results


# ------------------------------------------------------------------ nothing is sent in vain

@pytest.mark.parametrize("name, forward, backward", [
    ("copy_to", False, True), ("reduce_from", True, False), ("split", False, True),
    ("gather", True, False), ("all_gather", True, True), ("reduce_scatter", True, True)])
def test_which_direction_communicates(name, forward, backward):
    def fn(comm):
        op, x_lies, shape, y_lies = cases(comm)[name]
        x = Tensor(draw(shape, x_lies, comm, 1), requires_grad=True)
        with comm.counting() as there:
            y = op(x, comm)
        with comm.counting() as back:
            y.backward(draw(y.shape, y_lies, comm, 2))
        return there.messages > 0, back.messages > 0
    assert run_threads(2, fn) == [(forward, backward)] * 2


def test_a_single_precision_array_stays_one():
    def fn(comm):
        x = Tensor(np.ones((4, 4), np.float32), requires_grad=True)
        y = mappings.reduce_from(mappings.copy_to(x, comm), comm)
        y = mappings.all_gather(mappings.reduce_scatter(y, comm, 0), comm, 0)
        y.backward(np.ones(y.shape, np.float32))
        return y.dtype, x.grad.dtype
    assert run_threads(2, fn) == [(np.float32, np.float32)] * 2
