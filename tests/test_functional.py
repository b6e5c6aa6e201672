"""The fused operations against central differences, PyTorch, and plain compositions."""
import weakref

import numpy as np
import pytest

from minidist.engine import attention, graph
from minidist.engine import functional as F
from minidist.engine.data import random_batch
from minidist.engine.tape import scale_losses
from minidist.engine.tensor import Tensor, graph_bytes, no_grad, replay, run_deferred
from tests.gradcheck import check_op, close, inputs, value_and_gradients
from tests.models import perturb, tiny
from tests.pytorch import check_torch, needs_torch, torch

IDS = np.array([[0, 3, 3, 1], [3, 2, 0, 3]])
TARGETS = np.array([[1, F.IGNORE, 4], [0, 2, F.IGNORE]])
MASK = F.dropout_mask(0.4, 7, np.float64, np.arange(2), np.arange(4), np.arange(9), np.arange(9))


def attend(causal=True, dropout=None, **options):
    def fn(q, k, v):
        mask = None if dropout is None else dropout.astype(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, causal, dropout=mask, **options)
    return fn


def torch_attend(causal=True, dropout=None, visible=None):
    def reference(q, k, v):
        share = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(share, 1) for x in (k, v))
        s = q @ k.mT / q.shape[-1] ** 0.5
        if causal:
            seen = np.tril(np.ones(s.shape[-2:], bool)) if visible is None else visible
            s = s.masked_fill(~torch.tensor(seen), -torch.inf)
        p = s.softmax(-1)
        return (p if dropout is None else p * torch.tensor(dropout)) @ v
    return reference


def torch_functional(name):
    return lambda *args, **options: getattr(torch.nn.functional, name)(*args, **options)


# name: (operation, PyTorch's, shapes)
OPERATIONS = {
    "linear":         (F.linear, torch_functional("linear"), (2, 3, 4), (5, 4), (5,)),
    "linear no bias": (F.linear, torch_functional("linear"), (3, 4), (5, 4)),
    "embedding":      (lambda w: F.embedding(w, IDS), lambda w: w[torch.tensor(IDS)], (5, 3)),
    "layer_norm":     (F.layer_norm,
                       lambda x, w, b: torch_functional("layer_norm")(x, (5,), w, b),
                       (2, 3, 5), (5,), (5,)),
    "gelu":           (F.gelu, lambda x: torch_functional("gelu")(x, approximate="tanh"), (4, 3)),
    "softmax":        (F.softmax, lambda x: x.softmax(-1), (2, 3, 4)),
    "softmax 0":      (lambda x: F.softmax(x, 0), lambda x: x.softmax(0), (2, 3, 4)),
    "cross_entropy":  (lambda x: F.cross_entropy(x, TARGETS)[0],
                       lambda x: torch_functional("cross_entropy")(
                           x.mT, torch.tensor(TARGETS), reduction="sum"), (2, 3, 5)),
    "dropout":        (lambda x: F.dropout(x, MASK[0, 0].astype(x.dtype)),
                       lambda x: x * torch.tensor(MASK[0, 0]), (9, 9)),
    "attention":      (attend(), torch_attend(), (2, 4, 9, 3), (2, 4, 9, 3), (2, 4, 9, 3)),
    "attention grouped": (attend(), torch_attend(), (2, 4, 9, 3), (2, 2, 9, 3), (2, 2, 9, 3)),
    "attention one kv": (attend(), torch_attend(), (1, 3, 5, 3), (1, 1, 5, 3), (1, 1, 5, 3)),
    "attention full": (attend(False), torch_attend(False),
                       (2, 4, 5, 3), (2, 2, 9, 3), (2, 2, 9, 3)),
    "attention dropout": (attend(dropout=MASK), torch_attend(dropout=MASK),
                          (2, 4, 9, 3), (2, 2, 9, 3), (2, 2, 9, 3)),
    "attention dropout full": (attend(False, dropout=MASK), torch_attend(False, MASK),
                               (2, 4, 9, 3), (2, 2, 9, 3), (2, 2, 9, 3)),
}


@pytest.fixture(params=[64, 4], ids=["one tile", "many tiles"])
def tile(request, monkeypatch):
    monkeypatch.setattr(attention, "TILE", request.param)


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradient_is_the_central_difference(name, tile):
    fn, _, *shapes = OPERATIONS[name]
    check_op(fn, *shapes)


@needs_torch
@pytest.mark.parametrize("name", OPERATIONS)
def test_value_and_gradient_are_pytorchs(name, tile):
    fn, reference, *shapes = OPERATIONS[name]
    check_torch(fn, reference, *shapes)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_keeps_its_dtype(name, dtype):
    """Of its result, its gradients, and all that it keeps for backward."""
    fn, _, *shapes = OPERATIONS[name]
    xs = [Tensor(x.astype(dtype), requires_grad=True) for x in inputs(shapes)]
    y = fn(*xs)
    kept = [a.dtype for a in graph.captured(y.node.vjp) if a.dtype.kind == "f"]
    assert {y.dtype, *kept} == {np.dtype(dtype)}
    y.backward(np.ones(y.shape))
    assert {x.grad.dtype for x in xs} == {np.dtype(dtype)}


# ------------------------------------------------------------------------ attention by positions

def test_positions_in_any_order_give_the_same_rows():
    """What context parallelism asks for: my queries, everybody's keys, ids in any order."""
    q, k, v = inputs([(2, 4, 9, 3), (2, 2, 9, 3), (2, 2, 9, 3)])
    whole, g, grads = value_and_gradients(attend(), (q, k, v))
    mine, keys = np.array([7, 2, 3, 0]), np.random.default_rng(0).permutation(9)
    part, _, (gq, _, _) = value_and_gradients(
        attend(positions=mine, key_positions=keys),
        (q[:, :, mine], k[:, :, keys], v[:, :, keys]), g[:, :, mine])
    close(part, whole[:, :, mine], 1e-14)
    close(gq, grads[0][:, :, mine], 1e-14)


def test_positions_cut_over_ranks_add_up():
    q, k, v = inputs([(2, 4, 9, 3), (2, 2, 9, 3), (2, 2, 9, 3)])
    _, g, (_, gk, gv) = value_and_gradients(attend(), (q, k, v))
    sums = [0, 0]
    for mine in ([0, 8, 1], [7, 2], [3, 6, 4, 5]):
        _, _, (_, *parts) = value_and_gradients(
            attend(positions=np.array(mine)), (q[:, :, mine], k, v), g[:, :, mine])
        sums = [s + p for s, p in zip(sums, parts)]
    close(sums[0], gk, 1e-14)
    close(sums[1], gv, 1e-14)


@needs_torch
def test_positions_against_pytorch(tile):
    mine, keys = np.array([7, 2, 3, 5, 4]), np.array([3, 8, 2, 0, 5, 6, 1])
    visible = mine[:, None] >= keys
    check_torch(attend(positions=mine, key_positions=keys), torch_attend(visible=visible),
                (2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 3))


def test_a_query_that_sees_nothing_gives_zero(tile):
    fn = attend(positions=np.array([0, 5, 1]), key_positions=np.array([2, 3, 9, 4, 1]))
    shapes = (1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)
    y, _, grads = value_and_gradients(fn, inputs(shapes))
    assert (y[:, :, 0] == 0).all() and (grads[0][:, :, 0] == 0).all()
    assert all(np.isfinite(x).all() for x in (y, *grads))
    check_op(fn, *shapes)


def test_nothing_is_attended_to_without_keys():
    """Not one key at all, or none that is seen: zeros, and gradients of zero."""
    for S, options in ((0, {}), (3, dict(key_positions=np.arange(20, 23)))):
        for causal in (True, False) if S == 0 else (True,):
            shapes = (2, 4, 5, 3), (2, 2, S, 3), (2, 2, S, 3)
            fn = attend(causal, return_lse=True, **options)
            y, lse = fn(*map(Tensor, inputs(shapes)))
            assert (lse.data == -np.inf).all() and not y.data.any()
            _, _, grads = value_and_gradients(attend(causal, **options), inputs(shapes))
            assert not any(g.any() for g in grads)


def test_a_rank_without_queries_leaves_its_keys_alone():
    shapes = (2, 4, 0, 3), (2, 2, 5, 3), (2, 2, 5, 3)
    y, _, grads = value_and_gradients(attend(positions=np.arange(0)), inputs(shapes))
    assert y.size == 0 and not any(g.any() for g in grads)


def test_huge_scores_do_not_overflow():
    q, k, v = (x.astype(np.float32) for x in inputs([(1, 2, 9, 4)] * 3))
    y, _, grads = value_and_gradients(attend(), (q * np.float32(1e4), k, v))
    assert all(np.isfinite(x).all() for x in (y, *grads))
    with pytest.raises(ValueError, match="3 query heads do not share 2"):
        attend()(*map(Tensor, inputs([(1, 3, 4, 2), (1, 2, 4, 2), (1, 2, 4, 2)])))


def test_causal_tiles_skip_what_nobody_sees(monkeypatch):
    """Weights kept: T (T + tile) / 2 of each head's T x T."""
    q, k, v = (Tensor(x, requires_grad=True) for x in inputs([(1, 1, 64, 2)] * 3))
    held = {}
    for tile in (64, 8):
        monkeypatch.setattr(attention, "TILE", tile)
        held[tile] = graph_bytes(attend()(q, k, v))
    assert held[64] - held[8] == 8 * (64 * 64 - 64 * (64 + 8) // 2)


ZIGZAG = [np.r_[0:8, 56:64], np.r_[8:16, 48:56], np.r_[16:24, 40:48], np.r_[24:32, 32:40]]
PIECES = {"runs": np.split(np.arange(64), 4), "zigzag": ZIGZAG,
          "stripes": [np.arange(r, 64, 4) for r in range(4)],
          "shuffled": np.split(np.random.default_rng(0).permutation(64), 4)}


def scores_of(monkeypatch, fn, *arrays):
    """Count the scores that a forward computes."""
    sizes, softmax = [], attention._softmax
    monkeypatch.setattr(attention, "_softmax",
                        lambda s, *rest: (sizes.append(s.size), softmax(s, *rest))[1])
    fn(*map(Tensor, arrays))
    monkeypatch.setattr(attention, "_softmax", softmax)
    return sum(sizes)


def visible_blocks(queries, keys, tile):
    """The same by hand: each tile of queries in order meets the keys up to its last."""
    queries = np.sort(queries)
    return sum(len(t) * int((keys <= t[-1]).sum())
               for t in (queries[i:i + tile] for i in range(0, len(queries), tile)))


@pytest.mark.parametrize("name", PIECES)
def test_tiles_are_skipped_by_position(name, monkeypatch):
    """On a ring of 4 ranks: runs and zigzags of whole tiles cost no more than one process does."""
    monkeypatch.setattr(attention, "TILE", 8)
    x = np.ones((1, 1, 16, 2))
    found = [[scores_of(monkeypatch, attend(positions=mine, key_positions=keys), x, x, x)
              for keys in PIECES[name]] for mine in PIECES[name]]
    assert found == [[visible_blocks(mine, keys, 8) for keys in PIECES[name]]
                     for mine in PIECES[name]]
    one = scores_of(monkeypatch, attend(), *3 * [np.ones((1, 1, 64, 2))])
    assert one == 64 * (64 + 8) // 2
    if name in ("runs", "zigzag"):
        assert np.sum(found) == one
    if name == "zigzag":
        assert len(set(np.sum(found, 1))) == 1              # and all ranks have as much to do


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("causal", [True, False])
def test_pieces_of_the_keys_merge_by_log_sum_exp(name, causal, tile):
    """As on a ring: results on pieces, weighed by exp(lse_i - lse), with gradients through both."""
    arrays = inputs([(2, 4, 64, 3), (2, 2, 64, 3), (2, 2, 64, 3)])
    mask = F.dropout_mask(0.4, 7, np.float64, *map(np.arange, (2, 4, 64, 64)))
    whole, g, grads = value_and_gradients(attend(causal, mask), arrays)
    mine, sums = PIECES[name][2], [np.zeros_like(a) for a in arrays]

    def ring(q, k, v):
        parts = [attend(causal, mask[:, :, mine][..., keys], positions=mine, key_positions=keys,
                        return_lse=True)(q, k[:, :, keys], v[:, :, keys]) for keys in PIECES[name]]
        top = np.max([lse.data for _, lse in parts], 0)
        weights = [(lse - top).exp() for _, lse in parts]
        total = sum(weights[1:], weights[0])
        return sum(y * (w / total).reshape(2, 4, 16, 1) for (y, _), w in zip(parts, weights))

    part, _, (gq, _, _) = value_and_gradients(ring, [arrays[0][:, :, mine], *arrays[1:]],
                                              g[:, :, mine])
    close(part, whole[:, :, mine], 1e-14)
    close(gq, grads[0][:, :, mine], 1e-13)
    for mine in PIECES[name]:
        _, _, found = value_and_gradients(ring, [arrays[0][:, :, mine], *arrays[1:]],
                                          g[:, :, mine])
        sums[1], sums[2] = sums[1] + found[1], sums[2] + found[2]
    close(sums[1], grads[1], 1e-13)
    close(sums[2], grads[2], 1e-13)


@needs_torch
def test_log_sum_exp_is_pytorchs(tile):
    """And its gradient, beside that of the result."""
    mine, keys = np.array([7, 2, 3, 5, 4]), np.array([3, 8, 2, 0, 5, 6, 1])
    visible = torch.tensor(mine[:, None] >= keys)

    def ours(q, k, v):
        y, lse = attend(positions=mine, key_positions=keys, return_lse=True)(q, k, v)
        return (y * y).sum(-1) + lse * 3

    def reference(q, k, v):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        s = (q @ k.mT / 3 ** 0.5).masked_fill(~visible, -torch.inf)
        return ((s.softmax(-1) @ v) ** 2).sum(-1) + torch.logsumexp(s, -1) * 3
    check_torch(ours, reference, (2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 3))


# ------------------------------------------------------------------------ embedding, cross entropy

def test_embedding_of_what_is_inside():
    """As a vocabulary cut over ranks: foreign ids, negative too, give zero rows and no gradient."""
    w, ids = inputs([(3, 2)])[0], np.array([[-2, 0, 2], [1, 5, 1]])
    inside = (ids >= 0) & (ids < 3)
    y, g, (gw,) = value_and_gradients(lambda w: F.embedding(w, ids, inside), [w])
    assert (y[~inside] == 0).all() and np.array_equal(y[inside], w[ids[inside]])
    expected = np.zeros_like(w)
    np.add.at(expected, ids[inside], g[inside])
    close(gw, expected, 1e-15)
    nobody = np.zeros_like(inside)
    assert (value_and_gradients(lambda w: F.embedding(w, ids, nobody), [w])[2][0] == 0).all()


@pytest.mark.parametrize("bad", [-1, 5])
def test_ids_outside_raise(bad):
    with pytest.raises(IndexError, match="5 rows"):
        F.embedding(Tensor(np.ones((5, 2))), np.array([0, bad]))
    with pytest.raises(IndexError, match="5 classes"):
        F.cross_entropy(Tensor(np.ones((2, 5))), np.array([0, bad]))


def test_cross_entropy_is_a_sum_and_a_count():
    logits = inputs([(2, 3, 5)])[0]
    loss, count = F.cross_entropy(Tensor(logits), TARGETS)
    rows = [F.cross_entropy(Tensor(logits[i]), TARGETS[i]) for i in range(2)]
    assert count == 4 == sum(n for _, n in rows)
    assert np.isclose(loss.item(), sum(part.item() for part, _ in rows), rtol=1e-14)
    nothing = np.full((2, 3), F.IGNORE)
    x = Tensor(logits, requires_grad=True)
    loss, count = F.cross_entropy(x, nothing)
    loss.backward()
    assert count == 0 and loss.item() == 0 and (x.grad == 0).all()
    assert F.cross_entropy(Tensor(logits), np.where(TARGETS < 0, -1, TARGETS), -1)[1] == 4


def test_cross_entropy_of_huge_logits():
    x = Tensor(np.array([[1e5, 0, 0]], np.float32), requires_grad=True)
    loss, _ = F.cross_entropy(x, np.array([1]))
    loss.backward()
    assert loss.item() == 1e5 and np.array_equal(x.grad, [[1, -1, 0]])


# ------------------------------------------------------------------------ empty, frozen, strided

def test_batches_without_rows():
    """The last micro-batches of a short batch are empty."""
    w, b = (Tensor(np.ones(s), requires_grad=True) for s in ((4, 4), (4,)))
    ids = np.zeros((0, 6), int)
    x = F.layer_norm(F.linear(F.embedding(w, ids), w, b), b, b)
    h = F.gelu(x).reshape(0, 6, 2, 2).transpose(0, 2, 1, 3)
    y = F.scaled_dot_product_attention(h, h, h).transpose(0, 2, 1, 3).reshape(0, 6, 4)
    loss, count = F.cross_entropy(F.softmax(y), ids)
    loss.backward()
    assert count == 0 and loss.item() == 0 and (w.grad == 0).all() and (b.grad == 0).all()


@pytest.mark.parametrize("name", ["linear", "layer_norm"])
def test_frozen_inputs_get_no_gradient(name):
    fn, _, *shapes = OPERATIONS[name]
    for frozen in range(3):
        xs = [Tensor(x, requires_grad=i != frozen) for i, x in enumerate(inputs(shapes))]
        y = fn(*xs)
        y.backward(np.ones(y.shape))
        assert [x.grad is None for x in xs] == [i == frozen for i in range(3)]


@pytest.mark.parametrize("name", ["linear", "layer_norm", "gelu", "softmax", "attention grouped"])
def test_inputs_and_gradients_in_any_layout(name):
    fn, _, first, *rest = OPERATIONS[name]
    first, *rest = inputs([first, *rest])
    y, g, grads = value_and_gradients(fn, [first, *rest])
    for loose in (np.asfortranarray, lambda x: np.repeat(x, 2, -1)[..., ::2]):
        t = Tensor(loose(first), requires_grad=True)
        again = fn(t, *map(Tensor, rest))
        again.backward(loose(g))
        close(again.data, y, 1e-14)
        close(t.grad, grads[0], 1e-14)


def test_weights_are_read_again_in_backward():
    """So that ZeRO-3 can free them after forward and fill them in again."""
    x, w = (Tensor(x, requires_grad=True) for x in inputs([(3, 4), (5, 4)]))
    y, kept = F.linear(x, w), w.data
    w.data = None
    w.data = kept.copy()
    y.backward(np.ones((3, 5)))
    close(x.grad, np.ones((3, 5)) @ kept, 1e-15)
    with pytest.raises(RuntimeError, match="linear needs was changed in place"):
        y = F.linear(x, w)
        with no_grad():
            w[:] = 0.0
        y.backward(np.ones((3, 5)))


def test_deferred_weight_gradients_are_the_same():
    x, w, b = (Tensor(x, requires_grad=True) for x in inputs([(3, 4), (4, 4), (4,)]))
    late = []
    for defer in (None, late):
        y = F.layer_norm(F.linear(F.linear(x, w, b), w, b), b, b)
        y.backward(np.arange(12.0).reshape(3, 4), defer=defer)
        if defer is None:
            now = [t.grad for t in (x, w, b)]
            x.grad = w.grad = b.grad = None
    assert np.array_equal(x.grad, now[0]) and w.grad is None and b.grad is None
    assert len(late) == 2
    run_deferred(late)
    close(w.grad, now[1], 1e-14)
    close(b.grad, now[2], 1e-14)


def half(x):
    return Tensor(np.asarray(x, np.float16), requires_grad=True)


def test_float16_is_summed_wider():
    """Statistics, softmax, loss and gradients, where sums in 16 bits would end or stand still."""
    rows = np.random.default_rng(0).standard_normal((6, 600)) * 200 + 2000
    grads, wide_grads = [], []
    for dtype, found in ((np.float16, grads), (np.float64, wide_grads)):
        x, w, b = (Tensor(a.astype(np.float16).astype(dtype), requires_grad=True)
                   for a in (rows, np.full(600, 0.5), np.zeros(600)))
        y = F.layer_norm(x, w, b)
        y.backward(np.linspace(0, 90, 3600).reshape(6, 600).astype(np.float16))
        found += [y.data, x.grad, w.grad, b.grad]
    for found, wide in zip(grads, wide_grads):
        close(found.astype(np.float64), wide, 4e-3)
    p = F.softmax(half(np.zeros(70000)))                    # 70000 is infinite in 16 bits
    assert p.data.sum(dtype=float) == pytest.approx(1, rel=1e-2)
    loss, _ = F.cross_entropy(half(np.zeros((1, 70000))), np.array([0]))
    assert loss.item() == pytest.approx(np.log(70000), rel=1e-3)
    x = half(np.zeros((5000, 2)))
    loss, _ = F.cross_entropy(x, np.zeros(5000, int))
    loss.backward()
    assert loss.item() == pytest.approx(5000 * np.log(2), rel=1e-3) and (x.grad[:, 0] == -0.5).all()
    w = half(np.zeros((3, 2)))
    F.embedding(w, np.ones(4096, int)).backward(np.ones((4096, 2)))
    assert (w.grad[1] == 4096).all()


def test_freed_parameters_are_read_again_in_backward():
    """As ZeRO-3 does it with all of them, in the whole model and in each operation on a leaf."""
    model = perturb(tiny(dropout=0.2))
    batch = random_batch(13, 8, 3, seed=0, step=1)
    model(batch).backward()
    whole = {p.name: p.grad for p in model.parameters()}
    model.zero_grad()
    loss, kept = model(batch), {}
    for p in model.parameters():
        kept[p.name], gone = p.data.copy(), weakref.ref(p.data)
        p.data = None
        assert gone() is None, f"the graph keeps the data of {p.name}"
    for p in model.parameters():
        p.data = kept[p.name]
    loss.backward()
    assert all(np.array_equal(p.grad, whole[p.name]) for p in model.parameters())


@pytest.mark.parametrize("fn", [
    lambda a, b: a * b, lambda a, b: a / b, lambda a, b: a @ b, lambda a, b: a ** 3 + b,
    lambda a, b: a.log() + b, lambda a, b: F.linear(a * 1, b)])
def test_operations_on_parameters_keep_no_data(fn):
    a, b = (Tensor(x, requires_grad=True) for x in inputs([(3, 3), (3, 3)], positive=True))
    fn(a, b).backward(np.ones((3, 3)))
    whole = a.grad, b.grad
    a.grad = b.grad = None
    y, data = fn(a, b), (a.data.copy(), b.data.copy())
    gone = weakref.ref(a.data), weakref.ref(b.data)
    a.data = b.data = None
    assert gone[1]() is None
    a.data, b.data = data
    y.backward(np.ones((3, 3)))
    assert np.array_equal(a.grad, whole[0]) and np.array_equal(b.grad, whole[1])


# ------------------------------------------------------------------------ auxiliary losses

def with_auxiliary(x, w):
    """Two layers, each with a loss of its own on the way.  -> main loss, sum of those"""
    total = 0
    for i in range(2):
        x = (x @ w).tanh()
        own = (x * x).sum() * 0.01
        total = own + total
        x = F.add_auxiliary_loss(x, own, f"layer {i}")
    return x.sum(), total


def added_in_the_open(x, w, weight):
    """The same losses, as one sum."""
    one = (x @ w).tanh()
    two = (one @ w).tanh()
    return two.sum() * weight + (one * one).sum() * 0.01 + (two * two).sum() * 0.01


@pytest.mark.parametrize("weight", [1.0, 0.0], ids=["with the main loss", "alone"])
@pytest.mark.parametrize("set_ahead", [True, False], ids=["scale set", "scale as seed"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_auxiliary_losses_act_as_if_added(scale, set_ahead, weight):
    """Also scaled as the loss is, whether its seed was set or given."""
    leaves = [[Tensor(a, requires_grad=True) for a in inputs([(4, 3), (3, 3)])] for _ in range(2)]
    loss = with_auxiliary(*leaves[0])[0] * weight
    if set_ahead:
        with scale_losses(scale):
            loss.backward()
    else:
        loss.backward(scale)
    added_in_the_open(*leaves[1], weight).backward(scale)
    for ours, ref in zip(*leaves):
        close(ours.grad, ref.grad, 1e-14)


def test_auxiliary_losses_of_a_stage():
    """A backward from the gradient of an activation knows the scale only by what is set."""
    x, w = (Tensor(a, requires_grad=True) for a in inputs([(4, 3), (3, 3)]))
    F.add_auxiliary_loss(x @ w, (w * w).sum()).backward(np.zeros((4, 3)))
    close(w.grad, 2 * w.data, 1e-15)
    with scale_losses(8):
        F.add_auxiliary_loss(x @ w, (w * w).sum()).backward(np.zeros((4, 3)))
    close(w.grad, 18 * w.data, 1e-15)


def test_auxiliary_values_are_collected():
    """Summed over micro-batches, once even if the forward is repeated, and only inside."""
    x, w = (Tensor(a, requires_grad=True) for a in inputs([(4, 3), (3, 3)]))
    with F.auxiliary_losses() as seen:
        _, total = with_auxiliary(x, w)
        assert sum(seen.values()) == pytest.approx(total.item(), rel=1e-14)
        once = dict(seen)
        with replay():
            with_auxiliary(x, w)
        assert seen == once and list(seen) == ["layer 0", "layer 1"]
        with no_grad():
            with_auxiliary(x, w)
        assert seen == {name: 2 * value for name, value in once.items()}
    with_auxiliary(x, w)
    assert seen == {name: 2 * value for name, value in once.items()}
    with pytest.raises(ValueError, match=r"one number, not an array of shape \(3, 3\)"):
        F.add_auxiliary_loss(x, w)


# ------------------------------------------------------------------------ dropout masks

def test_masks_are_pieces_of_one_mask():
    axes = np.arange(5, 9), np.arange(30), np.arange(100, 140)
    whole = F.dropout_mask(0.3, 11, np.float32, *axes)
    cut = F.dropout_mask(0.3, 11, np.float32, axes[0][1:3], axes[1][::-2], axes[2][7:])
    assert np.array_equal(cut, whole[1:3, ::-2, 7:]) and whole.dtype == np.float32


def test_masks_look_random():
    mask = F.dropout_mask(0.25, 1, np.float64, np.arange(300), np.arange(400)) > 0
    assert abs(mask.mean() - 0.75) < 0.005
    for other in (F.dropout_mask(0.25, 2, np.float64, np.arange(300), np.arange(400)) > 0,
                  np.roll(mask, 1, 0), np.roll(mask, 1, 1), mask[:, ::-1]):
        assert abs(np.corrcoef(mask.ravel(), other.ravel())[0, 1]) < 0.02
    assert abs(mask.mean(0) - 0.75).max() < 0.15 and abs(mask.mean(1) - 0.75).max() < 0.15


def test_masks_keep_the_expectation():
    mask = F.dropout_mask(0.5, 3, np.float32, np.arange(4), np.arange(5))
    assert set(np.unique(mask)) <= {0.0, 2.0}
    assert (F.dropout_mask(0.0, 3, np.float32, np.arange(9)) == 1).all()
    assert F.dropout_mask(0.5, 2**40 + 3, np.float32, np.arange(0)).shape == (0,)
