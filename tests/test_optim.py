"""Optimizers against PyTorch, against pencil and paper, and on the arrays of any layout."""
import math
import tracemalloc

import numpy as np
import pytest

from minidist.engine import optim
from minidist.engine.nn import Parameter
from minidist.engine.optim import SGD, AdamW, clip_grad_norm, clip_scale, warmup_cosine

SHAPES = [(5, 7), (7,), (3, 2, 4), (1,)]


def parameters(dtype=np.float64, shapes=SHAPES):
    rng = np.random.default_rng(0)
    return [Parameter(rng.standard_normal(s).astype(dtype), f"p{i}") for i, s in enumerate(shapes)]


def gradients(params, step):
    rng = np.random.default_rng([1, step])
    for p in params:
        p.grad = rng.standard_normal(p.shape).astype(p.dtype)


@pytest.mark.parametrize("make, theirs", [
    (lambda ps: SGD(ps, 0.1), ("SGD", dict(lr=0.1))),
    (lambda ps: SGD(ps, 0.1, momentum=0.9, weight_decay=0.01),
     ("SGD", dict(lr=0.1, momentum=0.9, weight_decay=0.01))),
    (lambda ps: AdamW(ps, 0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3),
     ("AdamW", dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3))),
], ids=["sgd", "sgd-momentum-decay", "adamw"])
def test_equals_pytorch(make, theirs):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    params = parameters()
    mirror = [torch.tensor(p.data.copy(), requires_grad=True) for p in params]
    name, options = theirs
    groups = [dict(params=[t for t in mirror if t.ndim > 1]),
              dict(params=[t for t in mirror if t.ndim < 2], weight_decay=0.0)]
    ours, reference = make(params), getattr(torch.optim, name)(groups, **options)
    for step in range(5):
        gradients(params, step)
        for p, t in zip(params, mirror):
            t.grad = torch.tensor(0.5 * p.grad)
        ours.step(scale=0.5)
        reference.step()
    for p, t in zip(params, mirror):
        np.testing.assert_allclose(p.data, t.detach().numpy(), rtol=1e-13, atol=1e-15)


def test_adamw_first_step_by_hand():
    """At t = 1 both means are the gradient itself: every element moves by the rate."""
    p = Parameter(np.array([1.0, -2.0]), "p")
    p.grad = np.array([0.5, -3.0])
    AdamW([p], 0.1, eps=0.0).step()
    np.testing.assert_allclose(p.data, [0.9, -1.9], rtol=1e-15)


def test_decay_is_for_matrices_only():
    """lr = decay = 0.1 and no gradient: matrices shrink to 0.99, everything else stays at 1."""
    params = [Parameter(np.ones(s), str(s)) for s in [(3, 4), (4,)]]
    flat = Parameter(np.ones((3, 4)), "flat")
    flat.data = flat.data.reshape(-1)[:5]          # a flat piece of a matrix is still of a matrix
    for p in params + [flat]:
        p.grad = np.zeros_like(p.data)
    AdamW(params + [flat], 0.1, weight_decay=0.1).step()
    assert [set(p.data.flat) for p in params + [flat]] == [{0.99}, {1.0}, {0.99}]


def test_schedule_moves_with_real_updates_only():
    """Warm-up over 4 updates, an overflow at attempt 2: no rate is skipped."""
    p = Parameter(np.ones(2), "p")
    optimizer, rates, counts = AdamW([p], warmup_cosine(1.0, 4, 100)), [], []
    for attempt in range(1, 6):
        p.grad = np.ones(2) * attempt
        if attempt != 2:
            optimizer.step()
            rates.append(optimizer.rate)
            counts.append(optimizer.t)
    assert rates == [0.25, 0.5, 0.75, 1.0] and counts == [1, 2, 3, 4]


def test_warmup_cosine_ends():
    rate = warmup_cosine(1.0, 10, 110, floor=0.1)
    assert rate(10) == 1.0 and math.isclose(rate(60), 0.55) and math.isclose(rate(110), 0.1)
    assert rate(500) == rate(110)
    assert warmup_cosine(1.0, 0, 10)(1) < 1.0


@pytest.mark.parametrize("make", [lambda ps: SGD(ps, 0.1, momentum=0.9, weight_decay=0.01),
                                  lambda ps: AdamW(ps, 0.1)], ids=["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_writes_in_place_through_any_view(make, dtype):
    """Slices of a buffer, transposed, strided: same numbers, same memory, same dtype."""
    rng = np.random.default_rng(2)
    plain = [Parameter(rng.standard_normal((6, 5)).astype(dtype), n) for n in "abc"]
    buffer, wide = np.zeros(100, dtype), np.zeros((6, 10), dtype)
    views = [buffer[7:37].reshape(6, 5), np.zeros((5, 6), dtype).T, wide[:, ::2]]
    others = [Parameter(v, p.name) for v, p in zip(views, plain)]
    for v, p in zip(views, plain):
        v[...] = p.data
    one, two = make(plain), make(others)
    for step in range(3):
        gradients(plain, step)
        for p, q in zip(plain, others):
            q.grad = np.asfortranarray(p.grad)
        one.step()
        two.step()
    for p, q, v in zip(plain, others, views):
        assert q.data is v and v.dtype == dtype
        np.testing.assert_array_equal(p.data, v)
        assert all(x.dtype == dtype for o in (one, two) for x in o.state[p.name])
    assert buffer[7:37].all() and not buffer[:7].any() and not buffer[37:].any()


def test_pieces_of_any_size_give_the_same(monkeypatch):
    results = []
    for chunk in (1, 3, 8, 1 << 14):
        monkeypatch.setattr(optim, "CHUNK", chunk)
        params = parameters(shapes=SHAPES + [(0, 3), (0,), ()])
        optimizer = AdamW(params, 0.1)
        for step in range(2):
            gradients(params, step)
            for p in params:
                p.grad = np.asarray(p.grad)
            optimizer.step()
        results.append(np.concatenate([p.data.ravel() for p in params]))
    assert all(np.array_equal(r, results[0]) for r in results)


@pytest.mark.parametrize("make", [lambda ps: SGD(ps, 0.1, momentum=0.9, weight_decay=0.01),
                                  lambda ps: AdamW(ps, 0.1)], ids=["sgd", "adamw"])
def test_needs_no_temporary_of_the_parameters_size(make):
    p = Parameter(np.ones((1024, 1024), np.float32), "p")
    p.grad = np.ones_like(p.data)
    optimizer = make([p])
    optimizer.step()                                       # the state is made here
    tracemalloc.start()
    optimizer.step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < p.data.nbytes / 8


def test_state_is_by_name_and_only_where_a_gradient_was():
    params = parameters()
    gradients(params, 0)
    before, params[1].grad = params[1].data.copy(), None   # frozen, or unused in this step
    optimizer = AdamW(params, 0.1)
    optimizer.step()
    np.testing.assert_array_equal(params[1].data, before)
    assert set(optimizer.state) == {"p0", "p2", "p3"}
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


@pytest.mark.parametrize("make", [SGD, AdamW])
def test_refuses_nothing_to_train(make):
    with pytest.raises(ValueError, match="would train nothing"):
        make([], 0.1)


def test_refuses_a_parameter_listed_twice():
    p = Parameter(np.ones(2), "p")
    with pytest.raises(ValueError, match="share a name"):
        SGD([p, p], 0.1)


def test_step_tells_the_graph_that_the_parameter_changed():
    p = Parameter(np.ones((2, 2)), "p")
    loss = (p * p).sum()
    p.grad = np.ones((2, 2))
    SGD([p], 0.1).step()
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_clip_grad_norm():
    """3 and 4 have norm 5: clipped to 1 they become 0.6 and 0.8, to 10 they stay."""
    def pair():
        a, b, c = (Parameter(np.zeros(1), n) for n in "abc")
        a.grad, b.grad = np.array([3.0]), np.array([4.0])
        return a, b, c                                     # c has no gradient
    params = pair()
    assert clip_grad_norm(params, 1.0) == 5.0
    np.testing.assert_allclose([params[0].grad[0], params[1].grad[0]], [0.6, 0.8], rtol=1e-6)
    params = pair()
    assert clip_grad_norm(params, 10.0) == 5.0 and params[0].grad[0] == 3.0
    assert clip_grad_norm(params, None) == 5.0 and params[1].grad[0] == 4.0
    assert clip_scale(0.0, 1.0) == 1.0


# ------------------------------------------------------------------------------ the seams

def test_arrays_that_are_not_alike_are_refused():
    """A zip would stop at the shortest, and leave the rest of the parameter as it was."""
    for shape in [(4, 3), (5,), (5, 2)]:
        p = Parameter(np.ones((5, 3)), "p")
        p.grad = np.ones(shape)
        with pytest.raises(ValueError, match=r"shapes \[5, 3\], .* meet in one update"):
            SGD([p], 0.1).step()


@pytest.mark.parametrize("make", [lambda ps: SGD(ps, 0.1, momentum=0.9, weight_decay=0.01),
                                  lambda ps: AdamW(ps, 0.1)], ids=["sgd", "adamw"])
def test_a_target_is_written_in_the_place_of_the_parameter(make):
    """Halves of a flat array, by two optimizers with targets, make what one makes of the whole."""
    whole, halves = parameters(shapes=[(4, 3)])[0], parameters(shapes=[(4, 3)])[0]
    one, two = make([whole]), [make([halves]) for _ in range(2)]
    for i, optimizer in enumerate(two):
        optimizer.target = lambda p, at=slice(6 * i, 6 * i + 6): (p.data.reshape(-1)[at],
                                                                  p.grad.reshape(-1)[at])
    for step in range(3):
        gradients([whole], step)
        gradients([halves], step)
        for optimizer in (one, *two):
            optimizer.step(0.5)
    assert np.array_equal(whole.data, halves.data)
    for i, optimizer in enumerate(two):
        for mine, full in zip(optimizer.state["p0"], one.state["p0"]):
            assert np.array_equal(mine, full.reshape(-1)[6 * i:6 * i + 6])


def test_hooks_run_when_all_targets_are_written():
    params, seen = parameters(), []
    gradients(params, 0)
    before = [p.data.copy() for p in params]
    optimizer = SGD(params, 0.1)
    for name in "ab":
        optimizer.after_step.append(lambda name=name: seen.append(
            (name, sum(np.array_equal(p.data, old) for p, old in zip(params, before)))))
    optimizer.step()
    assert seen == [("a", 0), ("b", 0)]
