"""DeepSpeed-Ulysses: heads for tokens and back, at the price of all_to_alls; heads must divide."""
import numpy as np
import pytest

from minidist import BadInput, cost, cp, tp, ulysses
from minidist.engine.data import random_batch
from minidist.engine.tensor import Tensor
from minidist.mesh import DeviceMesh
from minidist.ranks.comm import run_threads
from tests.models import tiny

SIZES = dict(heads=12, width=24, context=24, kv_heads=12)


def rank_of(x, comm, dim):
    return np.split(x, comm.size, dim)[comm.rank]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_heads_for_tokens_and_back(p):
    """Exactly the other cut of the same array; there and back is the identity, backward too."""
    x = np.arange(2 * 12 * 24 * 3.0).reshape(2, 12, 24, 3)

    def fn(comm):
        mine = Tensor(rank_of(x, comm, 2), requires_grad=True)
        heads = ulysses.to_heads(mine, comm)
        assert np.array_equal(heads.data, rank_of(x, comm, 1))
        back = ulysses.to_tokens(heads, comm)
        assert np.array_equal(back.data, mine.data)
        heads.backward(rank_of(x * x, comm, 1))
        assert np.array_equal(mine.grad, rank_of(x * x, comm, 2))
        return True
    assert run_threads(p, fn) == [True] * p


def test_repeat_sums_its_gradients():
    x = Tensor(np.arange(2 * 2 * 3 * 1.0).reshape(2, 2, 3, 1), requires_grad=True)
    y = ulysses.repeat(x, 3)
    assert np.array_equal(y.data[:, [0, 2, 3, 5]], x.data[:, [0, 0, 1, 1]])
    g = np.random.default_rng(0).standard_normal(y.shape)
    y.backward(g)
    np.testing.assert_allclose(x.grad[:, 1], g[:, 3] + g[:, 4] + g[:, 5], atol=1e-15)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("K", [12, 2, 1])
def test_messages_and_bytes(p, K):
    """Per layer and way 4 all_to_alls, of (2H + 2K) e B T/p numbers; (p-1)/p of them travel."""
    if p == 3 and K == 2:
        return
    B, H, e, T, L = 5, 12, 2, 24, 3
    batch = random_batch(13, T, B, seed=1, step=0)

    def fn(comm):
        model = cp.parallelize(tiny(**{**SIZES, "kv_heads": K}), comm, "ulysses")
        with comm.counting() as forward:
            loss = model(model.localize(batch))
        with comm.counting() as backward:
            loss.backward()
        return [(c.by_label["all_to_all"].calls, c.messages, c.bytes) for c in (forward, backward)]

    nbytes = L * (2 * H + 2 * max(K, p)) * e * B * (T // p) * (p - 1) // p * 8
    sizes = cost.Sizes.of(tiny(**{**SIZES, "kv_heads": K}).config, B=B, w=8)
    for price in cost.ulysses(sizes, cost.Group(p)):
        assert price[1:] == (4 * L * (p - 1), nbytes)
    assert run_threads(p, fn) == [[(4 * L, 4 * L * (p - 1), nbytes)] * 2] * p


@pytest.mark.parametrize("heads, K, p, message", [
    (12, 12, 8, "12 heads with 12 key/value heads do not split over 8 .* --cp 1, 2, 3, 4, 6, 12"),
    (12, 2, 3, "12 heads with 2 key/value heads do not split over 3 ranks; use --cp 1, 2, 4, 6, 12")
])
def test_heads_that_do_not_divide_are_refused_on_every_rank(heads, K, p, message):
    def fn(comm):
        with comm.counting() as counted, pytest.raises(BadInput, match=message):
            cp.parallelize(tiny(heads=heads, kv_heads=K, width=24, context=24), comm, "ulysses")
        return counted.messages
    assert run_threads(p, fn) == [0] * p


def test_heads_that_tensor_parallelism_has_cut():
    """4 heads on 2 ranks leave 2 each, which do not go over 4 more."""
    def fn(world):
        mesh = DeviceMesh(world, cp=4, tp=2)
        model = tp.parallelize(tiny(heads=4, kv_heads=2, width=24, context=24), mesh["tp"])
        with pytest.raises(BadInput, match="2 heads with 1 key/value heads do not split over 4"):
            cp.parallelize(model, mesh["cp"], "ulysses")
        return True
    assert run_threads(8, fn) == [True] * 8
