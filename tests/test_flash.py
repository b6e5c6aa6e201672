"""Attention in tiles: equal to the plain one and to PyTorch's, in memory that grows with T."""
import numpy as np
import pytest

from minidist import flash, verify
from minidist.engine import functional as F
from minidist.engine.data import random_batch
from minidist.engine.tensor import Tensor, graph_bytes
from tests.gradcheck import check_op, close, inputs, value_and_gradients
from tests.pytorch import needs_torch, torch
from tests.models import tiny

SMALL = dict(QUERIES=4, KEYS=6)                     # tiles that a few tokens do not fit into


@pytest.fixture(params=[SMALL, dict(QUERIES=64, KEYS=32), {}], ids=["4x6", "64x32", "usual"])
def sizes(request, monkeypatch):
    for name, value in request.param.items():
        monkeypatch.setattr(flash, name, value)


def both(arrays, dropout=None, mask=None, **options):
    """Value and gradients of the tiled and of the plain one."""
    fns = (lambda q, k, v: flash.attention(q, k, v, dropout=dropout, **options),
           lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout=mask, **options))
    (y, _, grads), (ref, _, ref_grads) = (value_and_gradients(fn, arrays) for fn in fns)
    return [y, *grads], [ref, *ref_grads]


def equal(results, bound=1e-12):
    for x, ref in zip(*results):
        assert np.isfinite(x).all()
        close(x, ref, bound)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T, H, K, e", [(1, 1, 1, 1), (7, 4, 2, 3), (16, 3, 3, 4), (50, 6, 1, 8)])
def test_equal_to_the_plain_one(sizes, causal, T, H, K, e):
    equal(both(inputs([(2, H, T, e), (2, K, T, e), (2, K, T, e)]), causal=causal))


def test_at_the_usual_tiles():
    equal(both(inputs([(1, 2, 700, 4), (1, 1, 700, 4), (1, 1, 700, 4)])))


@pytest.mark.parametrize("order", ["zigzag", "reversed", "random", "later", "none seen"])
def test_by_position(sizes, order):
    """Queries and keys stand anywhere; some see nothing at all."""
    T = 12
    rng = np.random.default_rng(0)
    queries, keys = {"zigzag": (np.r_[0:6, 18:24], np.r_[6:18]), "later": (np.r_[20:32], np.r_[:9]),
                     "reversed": (np.arange(T)[::-1], np.arange(T)[::-1]),
                     "random": (rng.permutation(30)[:T], rng.permutation(30)[:9]),
                     "none seen": (np.r_[:T], np.r_[T:T + 9])}[order]
    S = len(keys)
    arrays = inputs([(2, 4, T, 3), (2, 2, S, 3), (2, 2, S, 3)])
    results = both(arrays, positions=queries, key_positions=keys)
    equal(results)
    if order == "none seen":
        assert not any(x.any() for x in results[0])


def test_dropout_by_position(sizes):
    rng = np.random.default_rng(0)
    mask = (rng.random((2, 4, 20, 20)) < 0.7) / 0.7

    def dropout(some, i, j):
        return mask.reshape(4, 2, 20, 20)[some][:, :, i][..., j]

    equal(both(inputs([(2, 4, 20, 3), (2, 2, 20, 3), (2, 2, 20, 3)]), dropout, mask))


def test_gradients_by_central_differences(monkeypatch):
    monkeypatch.setattr(flash, "QUERIES", 2), monkeypatch.setattr(flash, "KEYS", 2)
    check_op(flash.attention, (1, 2, 5, 2), (1, 1, 5, 2), (1, 1, 5, 2))


@pytest.mark.parametrize("size", [1e4, 1e2])
def test_large_scores(sizes, size):
    """Scores of +-1e4: a naive exp overflows, a finite mask value lets hidden keys win."""
    q, k, v = inputs([(1, 2, 20, 4), (1, 2, 20, 4), (1, 2, 20, 4)])
    equal(both([q * size, k, v]), bound=1e-11)


def test_a_masked_key_never_wins():
    """Its score is above the visible one's by 20000, more than any finite mask value takes off."""
    q, k, v = (np.reshape(x, (1, 1, -1, 1)) for x in ([-20000.], [1., 0.], [1., 100.]))
    y = flash.attention(*map(Tensor, (q, k, v)), positions=[0], key_positions=[0, 1])
    assert y.data.item() == 1.0


# ------------------------------------------------------------------ merging

def state(lse, out=0.0, dtype=np.float32):
    return np.full((1, 1), out, dtype), np.full(1, lse, dtype)


@pytest.mark.parametrize("a, b, lse, out", [
    (0, 100, 100, 2), (100, 0, 100, 1), (0, 0, np.log(2), 1.5),
    (-np.inf, 3, 3, 2), (3, -np.inf, 3, 1), (-np.inf, -np.inf, -np.inf, 1)])
def test_merge_on_one_number(a, b, lse, out):
    o, total = state(a, 1.0)
    flash.merge(o, total, *state(b, 2.0))
    np.testing.assert_allclose((o.item(), total.item()), (out, lse), rtol=1e-6)


def test_merge_in_any_order():
    rng = np.random.default_rng(0)
    parts = [(rng.standard_normal((3, 5, 2)), 30 * rng.standard_normal((3, 5))) for _ in range(4)]
    results = []
    for order in (0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0):
        o, lse = flash.nothing(np.zeros((3, 5, 2)))
        for i in order:
            flash.merge(o, lse, *parts[i])
        results.append((o, lse))
    for o, lse in results:
        np.testing.assert_allclose(o, results[0][0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(lse, results[0][1], rtol=1e-14)


def test_float32_stays_float32():
    q, k, v = (Tensor(x.astype(np.float32), requires_grad=True)
               for x in inputs([(1, 2, 9, 4), (1, 1, 9, 4), (1, 1, 9, 4)]))
    y = flash.attention(q, k, v)
    y.backward(np.ones(y.shape))
    assert {x.dtype for x in (y.data, q.grad, k.grad, v.grad)} == {np.dtype(np.float32)}


@needs_torch
@pytest.mark.parametrize("causal", [True, False])
def test_equal_to_pytorch(causal):
    arrays = inputs([(2, 3, 300, 8)] * 3)
    y, g, grads = value_and_gradients(lambda q, k, v: flash.attention(q, k, v, causal), arrays)
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
    ref = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)
    ref.backward(torch.tensor(g))
    equal(([y, *grads], [ref.detach().numpy(), *(t.grad.numpy() for t in tensors)]))


# ------------------------------------------------------------------ what is computed and held

def test_tiles_cover_what_is_visible_once():
    for queries, keys in ((np.arange(11), np.arange(11)), (np.r_[0:3, 9:12], np.r_[3:9]),
                          (np.r_[5, 2, 3, 9], np.r_[4, 3, 8, 0])):
        for causal in (True, False):
            count = np.zeros((len(queries), len(keys)), int)
            for mine, seen in flash.tiles(queries, keys, causal, 4, 3):
                count[mine, seen] += 1
            visible = (queries[:, None] >= keys) | (not causal)
            assert count.max(initial=0) <= 1 and np.all(count[visible] == 1)


def held(fn, T):
    arrays = [Tensor(x, requires_grad=True) for x in inputs([(2, 4, T, 8), *[(2, 2, T, 8)] * 2])]
    positions = np.arange(T)
    y = fn(*arrays, positions=positions, key_positions=positions)
    return graph_bytes(y, exclude=[positions])


def test_bytes_held_are_proportional_to_T():
    """q, k, v, out and lse: B T (2 H e + 2 K e + H) numbers, where the plain one holds T^2."""
    tiled = [held(flash.attention, T) for T in (300, 600, 1200)]
    assert tiled == [2 * T * (2 * 4 * 8 + 2 * 2 * 8 + 4) * 8 for T in (300, 600, 1200)]
    plain = [held(F.scaled_dot_product_attention, T) for T in (300, 600, 1200)]
    assert plain[2] > 3 * plain[1] > 9 * plain[0]


# ------------------------------------------------------------------ in a GPT

@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("scores", [1, 24, 36, 1 << 17])      # 1, 1, 2 heads at once; several rows
def test_a_gpt_with_tiles(dropout, scores, monkeypatch):
    for name, size in dict(QUERIES=4, KEYS=3, SCORES=scores).items():
        monkeypatch.setattr(flash, name, size)
    batch, found = random_batch(13, 8, 3, seed=1, step=0), []
    for change in (lambda model: model, flash.use):
        model = change(verify.perturb(tiny(dropout=dropout)))
        loss = model(batch)
        loss.backward()
        found.append([loss.data, *(p.grad for p in model.parameters())])
    equal(found)
