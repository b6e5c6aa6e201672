"""Mixture of experts in one process: hand examples, a loop over tokens, finite differences."""
from dataclasses import replace

import numpy as np
import pytest

from minidist import BadInput, cp, dp, moe, zero
from minidist.engine import functional as F
from minidist.engine.data import Batch
from minidist.engine.gpt import GPT, GPTConfig
from minidist.engine.tensor import Tensor
from minidist.mesh import DeviceMesh
from minidist.ranks.comm import run_threads

CONFIG = GPTConfig(vocab=11, context=6, width=4, heads=2, layers=2)


def layer(**routing):
    made = moe.MoE("m", moe.MoEConfig(**{"experts": 3, "top_k": 2, **routing}), CONFIG, 0, float)
    rng = np.random.default_rng(1)
    for p in trained(made):
        p.data[...] = rng.standard_normal(p.shape) * 0.5
    return made


def trained(m):
    return [p for p in m.parameters() if p.requires_grad]


def draw(n=7):
    return np.random.default_rng(2).standard_normal((1, n, 4))


def gelu(x):
    return F.gelu(Tensor(x)).data


def by_hand(m, x):
    """The same layer, one token and one expert at a time; dropless."""
    y, e = np.zeros_like(x), m.experts
    for t, v in enumerate(x):
        p = np.exp(m.router.data @ v)
        p /= p.sum()
        bias = np.zeros(len(p)) if m.bias is None else m.bias.data
        best = sorted(range(len(p)), key=lambda i: (-p[i] - bias[i], i))[:m.routing.top_k]
        total = sum(p[i] for i in best) if len(best) > 1 else 1
        for i in best:
            h = gelu(e.fc1.data[i] @ v + e.fc1_bias.data[i])
            y[t] += p[i] / total * (e.fc2.data[i] @ h + e.fc2_bias.data[i])
    return y


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_layer_equals_a_loop_over_tokens(k):
    m, x = layer(top_k=k, bias=0.1), draw()
    np.testing.assert_allclose(m(Tensor(x)).data[0], by_hand(m, x[0]), atol=1e-12)
    m.bias.data[:] = 0, 9, 0                                     # the choice moves, no gate does
    np.testing.assert_allclose(m(Tensor(x)).data[0], by_hand(m, x[0]), atol=1e-12)
    assert m.counts[1] == 7


@pytest.mark.parametrize("routing", [{}, dict(top_k=1), dict(capacity=0.6), dict(shared=True)])
def test_gradients_are_finite_differences(routing):
    m, x = layer(**routing), Tensor(draw(), requires_grad=True)
    g = np.random.default_rng(3).standard_normal(x.shape)
    m(x).backward(g)
    for p in [x, *m.parameters()]:
        flat, h = p.data.reshape(-1), 1e-6
        for i in range(0, flat.size, 5):
            kept, ends = flat[i], []
            for flat[i] in (kept + h, kept - h):
                ends.append((m(Tensor(x.data)).data * g).sum())
            flat[i] = kept
            assert abs((ends[0] - ends[1]) / (2 * h) - p.grad.reshape(-1)[i]) < 1e-6


def test_ties_go_to_the_lower_index():
    assert moe.choose(np.array([[1., 2, 2, 2], [0, 0, 0, 0]]), 2).tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize("drop, kept", [("probability", [0, 1, 0, 1]), ("position", [1, 1, 0, 0])])
def test_capacity_by_hand(drop, kept):
    config = moe.MoEConfig(2, 1, capacity=1.0, drop=drop)   # ceil(4 / 2) = 2 places
    got = moe.keep(np.zeros((4, 1), int), np.array([[.6], [.8], [.7], [.9]]), config)
    assert got[:, 0].tolist() == [bool(k) for k in kept]


def test_counts_are_conserved_and_the_dropped_get_zero():
    m = layer(experts=3, top_k=1, capacity=0.5)
    y, limit = m(Tensor(draw(12))).data[0], 2
    assert m.counts.sum() == 12
    assert (np.abs(y).sum(1) == 0).sum() == np.maximum(m.counts - limit, 0).sum() > 0


def test_a_drop_leaves_the_other_gates_as_they_are():
    """Counted from outside: with experts that answer 1, a token's result is its kept gates' sum."""
    m = layer(capacity=0.6)
    for p in m.experts.parameters():
        p.data[...] = 0
    m.experts.fc2_bias.data[...] = 1
    chosen, gates, flat = m.route(Tensor(draw()[0]))
    kept = moe.keep(chosen, gates.data, m.routing)
    assert (kept.sum(1) == 1).any()
    np.testing.assert_allclose(m(Tensor(draw())).data[0, :, 0], (gates.data * kept).sum(1))
    np.testing.assert_allclose(gates.data.sum(1), 1)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("n", [0, 1, 7])
def test_any_dtype_and_no_tokens(dtype, n):
    m = moe.MoE("m", moe.MoEConfig(3, 2, capacity=1.0, aux=0.1), CONFIG, 0, dtype)
    x = Tensor(draw(n).astype(dtype), requires_grad=True)
    y = m(x)
    y.backward(np.ones(y.shape, dtype))
    assert y.dtype == dtype and x.grad.shape == x.shape
    assert all(p.grad.dtype == dtype and np.isfinite(p.grad).all() for p in m.parameters())


def test_an_idle_expert_has_a_gradient_of_zeros():
    m = layer(top_k=1, bias=0.1)
    m.bias.data[:] = 9, 0, 0
    m(Tensor(draw())).backward(np.ones((1, 7, 4)))
    assert not m.experts.fc1.grad[1:].any() and m.experts.fc1.grad[0].any()


def test_balance_and_z_losses_by_hand():
    uniform = Tensor(np.full((6, 3), 1 / 3), requires_grad=True)
    loss = moe.balance_loss(uniform, np.array([4, 4, 4]), 0.01)
    assert loss.item() / 6 == pytest.approx(0.01)           # per token: the coefficient
    p = Tensor(np.array([[.7, .3], [.9, .1]]), requires_grad=True)
    loss = moe.balance_loss(p, np.array([2, 0]), 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * 2 * 1.6)
    np.testing.assert_allclose(p.grad, [[1, 0], [1, 0]])    # through P only
    assert moe.z_loss(Tensor(np.zeros((2, 4))), 0.1).item() == pytest.approx(.2 * np.log(4) ** 2)


@pytest.mark.parametrize("name", ["aux", "z"])
def test_auxiliary_losses_reach_the_router(name):
    m = layer(**{name: 0.1})
    m(Tensor(draw())).backward(np.zeros((1, 7, 4)))
    assert np.abs(m.router.grad).max() > 1e-4


def test_bias_evens_out_a_skewed_router():
    scores = np.random.default_rng(0).random((600, 4)) + [0.5, 0, 0, 0]
    bias = np.zeros(4)
    for _ in range(300):
        bias += moe.move(moe.count(moe.choose(scores + bias, 1), 4), 0.01)
    assert moe.count(moe.choose(scores, 1), 4).max() > 400
    assert moe.count(moe.choose(scores + bias, 1), 4).max() < 180


LONGER = replace(CONFIG, context=8)
SPREAD = {"dp": dp.parallelize, "ddp": dp.DistributedDataParallel, "cp": cp.parallelize,
          "zero": lambda model, comm: zero.parallelize(model, comm, 3)}


@pytest.mark.parametrize("name", SPREAD)
def test_tokens_are_not_shared_out_in_silence(name):
    """Each rank would balance its own share of the tokens."""
    def fn(world):
        axis = "cp" if name == "cp" else "dp"
        comm = DeviceMesh(world, **{axis: 2})[axis]
        with pytest.raises(BadInput, match="all 2 ranks.*ep.parallelize"):
            SPREAD[name](moe.replace_mlps(GPT(LONGER), moe.MoEConfig(experts=3)), comm)
        spread = dp.parallelize(GPT(CONFIG), comm)
        with pytest.raises(BadInput, match="plain model.*spread over"):
            moe.replace_mlps(spread, moe.MoEConfig(experts=3))
    run_threads(2, fn)


def test_a_gpt_with_experts_trains():
    model = moe.replace_mlps(GPT(CONFIG, dtype=float), moe.MoEConfig(4, 2, aux=0.01))
    tokens = np.arange(12).reshape(2, 6) % 11
    batch, losses = Batch.of(tokens, (tokens + 1) % 11), []
    for _ in range(20):
        model.zero_grad()
        loss = model(batch)
        loss.backward()
        losses.append(loss.item())
        for p in model.parameters():
            p.data -= 0.02 * p.grad
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("wrong", [dict(top_k=4), dict(top_k=0), dict(capacity=0), dict(drop="x")])
def test_bad_input(wrong):
    with pytest.raises(BadInput):
        moe.MoEConfig(**{"experts": 3, **wrong})
