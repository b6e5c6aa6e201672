"""The tape and the operations of tensor.py: gradients, accumulation, hooks, errors, memory."""
import functools
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from minidist.engine import graph, tape
from minidist.engine import tensor as T
from minidist.engine.tensor import Part, Tensor, graph_bytes, no_grad
from tests.gradcheck import check_op
from tests.pytorch import check_torch, needs_torch, torch


def same(x):
    return x


# name: (operation, shapes), or (operation, PyTorch's, shapes) where the names differ
OPERATIONS = {
    "add":            (lambda a, b: a + b, (4, 3), (4, 3)),
    "add a row":      (lambda a, b: a + b, (4, 3), (3,)),
    "add (1,)":       (lambda a, b: a + b, (1,), (5, 4)),
    "add 0-d":        (lambda a, b: a + b, (), (2, 3)),
    "add 0-d to 0-d": (lambda a, b: a + b, (), ()),
    "add middle":     (lambda a, b: a + b, (2, 1, 3), (4, 1)),
    "sub":            (lambda a, b: a - b, (4, 3), (3,)),
    "mul outer":      (lambda a, b: a * b, (4, 1), (1, 3)),
    "mul scalar":     (lambda a, b: a * b, (), (2, 3)),
    "mul (1, 1)":     (lambda a, b: a * b, (1, 1), (2, 3)),
    "div":            (lambda a, b: a / b, (4, 3), (4, 1), "positive"),
    "div by scalar":  (lambda a, b: a / b, (2, 3), (), "positive"),
    "constants":      (lambda a: 2 - (1 + a * 3) / 4 + 1 / a, (2, 3), "positive"),
    "power 2":        (lambda a: a ** 2, (2, 3)),
    "power 3":        (lambda a: a ** 3, (2, 3)),
    "power -0.5":     (lambda a: a ** -0.5, (2, 3), "positive"),
    "power 0":        (lambda a: a ** 0 + a, (2, 3)),
    "neg":            (lambda a: -a, (2, 3)),
    "square as x*x":  (lambda a: a * a, (2, 3)),
    "matmul":         (lambda a, b: a @ b, (2, 3), (3, 4)),
    "matmul batch":   (lambda a, b: a @ b, (2, 3, 4), (4, 5)),
    "matmul spread":  (lambda a, b: a @ b, (3, 4), (2, 4, 5)),
    "matmul batches": (lambda a, b: a @ b, (2, 1, 3, 4), (1, 5, 4, 2)),
    "exp":            (lambda a: a.exp(), (2, 3)),
    "log":            (lambda a: a.log(), (2, 3), "positive"),
    "sqrt":           (lambda a: a.sqrt(), (2, 3), "positive"),
    "tanh":           (lambda a: a.tanh(), (2, 3)),
    "relu":           (lambda a: a.relu(), (4, 3)),
    "sum":            (lambda a: a.sum(), (2, 3, 4)),
    "sum 0-d":        (lambda a: a.sum(), ()),
    "sum (0, 2)":     (lambda a: a.sum((0, 2)), (2, 3, 4)),
    "sum -1 keep":    (lambda a: a.sum(-1, True), (2, 3, 4)),
    "mean":           (lambda a: a.mean(), (2, 3)),
    "mean (0, 2)":    (lambda a: a.mean((0, 2)), (2, 3, 4)),
    "mean (0, 2) keep": (lambda a: a.mean((0, 2), True), (2, 3, 4)),
    "mean (-1,)":     (lambda a: a.mean((-1,)), (2, 3, 4)),
    "mean (-1,) keep": (lambda a: a.mean((-1,), True), (2, 3, 4)),
    "max":            (lambda a: a.max(), (2, 3)),
    "max 1":          (lambda a: a.max(1), lambda a: a.amax(1), (2, 3, 4)),
    "max (0, -1)":    (lambda a: a.max((0, -1), True),
                       lambda a: a.amax((0, -1), True), (2, 3, 4)),
    "cast":           (lambda a: a.cast(a.dtype) * a, lambda a: a * a, (2, 3)),
    "reshape":        (lambda a: a.reshape(3, -1), (2, 3, 4)),
    "reshape tuple":  (lambda a: a.reshape((4, 6)), (2, 3, 4)),
    "transpose":      (lambda a: a.transpose(2, 0, 1), lambda a: a.permute(2, 0, 1), (2, 3, 4)),
    "transpose all":  (lambda a: a.transpose(), lambda a: a.permute(2, 1, 0), (2, 3, 4)),
    "index int":      (lambda a: a[1], (2, 3, 4)),
    "index slices":   (lambda a: a[:, 1:, ::2], (2, 3, 4)),
    "index dots":     (lambda a: a[..., None, 2], (2, 3, 4)),
    "index repeats":  (lambda a: a[[0, 2, 0, 0]], (3, 4)),
    "index pairs":    (lambda a: a[[0, 1, 1], [2, 0, 0]], (2, 3)),
    "concatenate":    (lambda a, b: T.concatenate([a, b, a], 1),
                       lambda a, b: torch.cat([a, b, a], 1), (2, 3), (2, 1)),
    "split":          (lambda a: T.split(a, [1, 0, 3], 1)[2] * 3 + T.split(a, (2, 2), -1)[0][:, :1],
                       lambda a: a[:, 1:] * 3 + a[:, :1], (2, 4)),
    "a view, summed": (lambda a: (a[1:] + a[:-1]) * a[:1], (4, 3)),
    "strided":        (lambda a, b: a.transpose(1, 0) @ b, lambda a, b: a.T @ b, (4, 3), (4, 2)),
}


def case(name):
    *rest, = OPERATIONS[name]
    positive = rest[-1] == "positive"
    fns = [x for x in rest if callable(x)]
    return fns[0], fns[-1], [x for x in rest if isinstance(x, tuple)], positive


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradient_is_the_central_difference(name):
    fn, _, shapes, positive = case(name)
    check_op(fn, *shapes, positive=positive)


@needs_torch
@pytest.mark.parametrize("name", OPERATIONS)
def test_value_and_gradient_are_pytorchs(name):
    fn, reference, shapes, positive = case(name)
    check_torch(fn, reference, *shapes, positive=positive)


# ------------------------------------------------------------------------ accumulation

def leaf(value, dtype=np.float64):
    return Tensor(np.array(value, dtype), requires_grad=True)


def test_value_used_on_two_paths():
    """x=2; y=3x; a=2y; b=5y; c=a+b: 21, where following the first path only gives 6."""
    x = leaf(2)
    y = 3 * x
    (2 * y + 5 * y).backward()
    assert x.grad == 21


@pytest.mark.parametrize("uses", [2, 5, 12, 24])
def test_one_tensor_used_often(uses):
    x = leaf([1, 2])
    y = x * 1
    total = y * 1
    for i in range(1, uses):
        total = total + (i + 1) * y
    total.backward(np.ones(2))
    assert (x.grad == sum(range(1, uses + 1))).all()


def test_long_chains_need_no_recursion():
    x = leaf(1)
    y = x
    for _ in range(3000):
        y = y + x
    y.backward()
    assert x.grad == 3001
    for _ in range(100_000):
        y = x if y.node is None else -y
    del y                                                   # nor does forgetting a graph


def test_a_weight_in_two_layers():
    w, x = leaf([[2.0, 1], [0, 3]]), Tensor(np.array([[1.0, 1]]))
    (x @ w @ w).sum().backward()
    h = x.data @ w.data
    assert np.array_equal(w.grad, x.data.T @ (np.ones((1, 2)) @ w.data.T) + h.T @ np.ones((1, 2)))


def test_backward_twice_on_fresh_graphs_adds():
    x = leaf([1.0, 2])
    for _ in range(2):
        (x * x).sum().backward()
    assert np.array_equal(x.grad, 2 * 2 * x.data)
    x.grad = None
    (x * x).sum().backward()
    assert np.array_equal(x.grad, 2 * x.data)


def test_gradients_never_share_memory():
    """Not with one another, not with the seed, not with data: adding in place must stay private."""
    x, y = leaf([1.0, 2]), leaf([3.0, 4])
    seed = np.ones(2)
    (x + y).backward(seed)
    x.grad *= 10
    assert (y.grad == 1).all() and (seed == 1).all()
    live = np.array([5.0, 5])
    z = leaf([1.0, 1])
    Tensor(z.data, (z,), lambda g: (live,)).backward(seed)
    z.grad += 1
    assert (live == 5).all()
    x.grad = None
    x.backward(seed)                                        # the root is the leaf
    x.grad += 1
    assert (seed == 1).all()


def test_one_array_returned_for_two_parents():
    x, y = leaf([1.0, 2]), leaf([3.0, 4])
    a, b = x * 1, y * 1

    def vjp(g):
        both = 2 * g
        return both, both
    c = Tensor(a.data + b.data, (a, b), vjp)
    (c + a).backward(np.ones(2))
    assert (x.grad == 3).all() and (y.grad == 2).all()


def test_one_array_on_its_way_to_many():
    """An addition hands on what it got itself: a sum must not be taken in that array."""
    x, y, z = leaf([1.0, 2]), leaf([3.0, 4]), leaf([5.0, 6])
    a, b, c = x * 1, y * 1, z * 1
    ((a + b) + (a + c)).backward(np.ones(2))
    assert (x.grad == 2).all() and (y.grad == 1).all() and (z.grad == 1).all()


def test_leaf_gradients_are_contiguous():
    """A transposed gradient would be garbage to a communicator that sends memory as it lies."""
    x, y = leaf(np.ones((2, 3))), leaf(np.ones((2, 3)))
    (x.transpose() + y.transpose() * x.transpose()).backward(np.arange(6.0).reshape(3, 2))
    assert x.grad.flags.c_contiguous and y.grad.flags.c_contiguous
    assert np.array_equal(x.grad, 2 * np.arange(6.0).reshape(3, 2).T)


def test_losses_are_seeded_with_their_scale():
    """Its own, of the backward that runs: an explicit seed of a scalar is one, else what is set."""
    x, seen = leaf(2), []

    def loss(g_inner=None):
        def vjp(g):
            seen.append(tape.loss_scale())
            if g_inner is not None:
                loss().backward(g_inner)                    # a recomputation's
            return (g,)
        return Tensor(x.data, (x,), vjp)
    with tape.scale_losses(8):
        loss().backward()
        (loss() * np.ones(3)).backward(np.full(3, 5.0))     # from an activation's gradient
        loss().backward(2.0)
        loss(7.0).backward(3.0)
    loss().backward()
    assert seen == [8, 8, 2, 3, 3, 1] and tape.loss_scale() == 1
    assert x.grad == 8 + 15 + 2 + (3 + 7) + 1


def test_seeds_in_any_layout():
    g = np.arange(6.0).reshape(2, 3)
    strided, narrow = np.repeat(g, 2, 1)[:, ::2], g.astype(np.float32)
    for seed in (np.asfortranarray(g), strided, narrow, g.tolist()):
        x = leaf(np.ones((2, 3)))
        (x * 2).backward(seed)
        assert np.array_equal(x.grad, 2 * g) and x.grad.dtype == np.float64
    x = leaf(np.ones((2, 3)))
    (x * 2).backward(np.broadcast_to(np.float64(3), (2, 3)))
    assert (x.grad == 6).all()


def test_no_gradient_is_none():
    x, y, frozen = leaf(1), leaf(2), leaf(3)
    frozen.requires_grad = False
    (x * frozen + Tensor(y.data)).backward()
    assert x.grad == 3 and y.grad is None and frozen.grad is None


def test_max_shares_ties():
    x = leaf([[1.0, 3, 3], [2, 0, 1]])
    x.max(1).backward(np.ones(2))
    assert np.array_equal(x.grad, [[0, 0.5, 0.5], [1, 0, 0]])


def test_parts_add_up():
    x = leaf(np.zeros(4))
    y = x * 1
    (y[:3].sum() + y[1:].sum() * 2 + y.sum()).backward()
    assert np.array_equal(x.grad, [2, 4, 4, 3])


def test_part_of_a_leaf_with_data_elsewhere():
    """As ZeRO-3 has it: Tensors whose data come later, and a gradient gathered from parts."""
    shard = leaf(np.zeros(3))
    whole = Tensor(None, (shard,), lambda g: (g.sum(0),))
    view = Tensor(None, (whole,), lambda g: (Part((2, 3), np.s_[:, :2], g),))
    view.data = np.ones((2, 2))
    (view * view).sum().backward()
    assert np.array_equal(shard.grad, [4, 4, 0])


# ------------------------------------------------------------------------ dtypes

@pytest.mark.parametrize("other", [2, 2.5, True, np.float64(2), np.array(2.0), np.arange(3),
                                   np.ones(3, bool), np.ones((2, 3))], ids=repr)
def test_float32_never_widens(other):
    for op in (lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b):
        for flip in (False, True):
            x = leaf(np.full((2, 3), 2), np.float32)
            other_safe = np.maximum(other, 1)
            y = op(other_safe, x) if flip else op(x, other_safe)
            assert isinstance(y, Tensor) and y.dtype == np.float32
            y.backward(np.ones(y.shape))
            assert x.grad.dtype == np.float32 and x.grad.shape == (2, 3)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_keeps_its_dtype(name, dtype):
    fn, _, shapes, _ = case(name)
    xs = [leaf(np.full(shape, 1.5), dtype) for shape in shapes]
    y = fn(*xs)
    assert y.dtype == dtype and isinstance(y.data, np.ndarray)
    y.backward(np.ones(y.shape))
    assert all(x.grad.dtype == dtype and isinstance(x.grad, np.ndarray) for x in xs)


def test_cast_goes_there_and_back():
    """The value is rounded; the gradient is computed in the new dtype and comes back in the old."""
    x = leaf([1 / 3, 2.0])
    y = x.cast(np.float32)
    assert y.dtype == np.float32 and np.array_equal(y.data, x.data.astype(np.float32))
    (y * y).sum().backward()
    assert x.grad.dtype == np.float64 and np.array_equal(x.grad, 2 * y.data)
    with pytest.raises(TypeError, match="cast to int64 has no gradient"):
        x.cast(int)


def test_float16_is_summed_wider():
    """Sums whose terms, in 16 bits, would be lost behind 2048 or end in infinity."""
    ones, large = leaf(np.ones((4096, 3)), np.float16), leaf(np.full(4, 20000.0), np.float16)
    assert large.mean().item() == 20000 and large.mean().dtype == np.float16
    row = leaf(np.zeros(3), np.float16)
    for y in (ones.sum(0), ones.mean(0) * 4096, (ones + row).sum(0)):
        assert y.dtype == np.float16 and (y.data == 4096).all()
    (ones + row).backward(np.ones((4096, 3)))
    assert (row.grad == 4096).all()
    x = leaf([4096, 1, 1, 1, 1], np.float16)
    assert x.sum().item() == 4100


def test_two_dtypes_do_not_meet_by_accident():
    with pytest.raises(TypeError, match="float32 meets float64"):
        leaf(1, np.float32) + leaf(1)
    with pytest.raises(TypeError, match="only floats"):
        Tensor(np.arange(3), requires_grad=True)


# ------------------------------------------------------------------------ errors

def test_second_backward_says_so():
    x = leaf(1)
    y = x * x
    z = y * 2
    z.backward()
    for again in (z, y, y + 1):                             # also through a graph partly freed
        with pytest.raises(RuntimeError, match="run forward again"):
            again.backward()
    assert x.grad == 4


def test_backward_needs_a_scalar_or_a_gradient():
    x = leaf([1.0, 2])
    with pytest.raises(RuntimeError, match=r"shape \(2,\)"):
        (x * 2).backward()
    with pytest.raises(ValueError, match=r"shape \(3,\) for a Tensor of shape \(2,\)"):
        (x * 2).backward(np.ones(3))
    with pytest.raises(RuntimeError, match="no leaf"):
        Tensor(np.ones(())).backward()
    with no_grad():
        y = x.sum()
    with pytest.raises(RuntimeError, match="no leaf"):
        y.backward()


def test_wrong_vjps_are_reported():
    x = leaf(np.ones(4))
    with pytest.raises(RuntimeError, match=r"float64\(4, 4\) for a leaf float64\(4,\)"):
        Tensor(np.ones((4, 4)), (x,), lambda g: (g,)).backward(np.ones((4, 4)))
    with pytest.raises(RuntimeError, match="float32"):
        Tensor(x.data, (x,), lambda g: (g.astype(np.float32),)).backward(np.ones(4))
    y = x * 1
    with pytest.raises(RuntimeError, match="meet in one Tensor"):
        (Tensor(np.ones(1), (y,), lambda g: (g,)) + y).backward(np.ones(4))
    with pytest.raises(RuntimeError, match="returned 2 gradients for 1 parents"):
        Tensor(x.data, (x,), lambda g: (g, g)).backward(np.ones(4))
    assert x.grad is None


def test_matrices_only():
    with pytest.raises(ValueError, match="reshape vectors"):
        leaf([1.0, 2]) @ leaf([1.0, 2])
    with pytest.raises(ValueError, match="do not make up"):
        T.split(leaf([1.0, 2]), [1, 2])


CHANGES = {
    "an optimizer step":    lambda x, w, y: (np.add(w.data, 1, out=w.data), w.changed()),
    "a write into x":       lambda x, w, y: x.__setitem__(0, 7.0),
    "a write into a slice": lambda x, w, y: Tensor(x.data[1:]).__setitem__(0, 7.0),
    "a write into y":       lambda x, w, y: y.__setitem__(np.s_[:], 0.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changing_what_backward_needs(name):
    x, w = leaf(np.ones((2, 3))), leaf(np.ones((2, 3)))
    h = x * w
    y = h.exp()
    with no_grad():
        CHANGES[name](x, w, y)
    with pytest.raises(RuntimeError, match="changed in place"):
        (y * 1).sum().backward()


def test_changes_that_do_no_harm():
    x, w, b = leaf(np.ones((2, 3))), leaf(np.ones((2, 3))), leaf(np.ones(3))
    with no_grad():
        x[0] = 2.0                                          # before the forward
    y = x * w + b
    with no_grad():
        b[:] = 5.0                                          # an addition keeps nothing
        y[:] = 0.0
        w.data = w.data.copy()                              # freed and filled again: same values
    y.sum().backward()
    assert np.array_equal(w.grad, x.data)
    y = x * w
    with no_grad():
        w[:] = 3.0
    z = x * w                                               # made after the change
    z.sum().backward()
    with pytest.raises(RuntimeError, match="mul needs"):
        y.sum().backward()


def test_changes_are_forgotten_when_their_memory_dies():
    """But those of arrays that live are not, whatever view was written."""
    x, before = leaf(np.ones((2, 3))), len(graph._changes.when)
    y = x * x
    with no_grad():
        x[0] = 7.0
        many = [Tensor(np.zeros(2)) for _ in range(500)]
        for t in many:
            t[0] = Tensor(t.data[1:])[0] = 1.0
    assert len(graph._changes.when) >= 1000
    del many[1:], t
    Tensor(np.zeros(2))[0] = 1.0
    assert len(graph._changes.when) <= before + 1 + 2 + 1
    assert len(graph._changes.owners) <= len(graph._changes.when)
    with pytest.raises(RuntimeError, match="mul needs"):
        y.sum().backward()


def test_writing_in_place_needs_no_grad():
    x = leaf([1.0, 2])
    with pytest.raises(RuntimeError, match="no_grad"):
        x[0] = 1.0
    with pytest.raises(RuntimeError, match="no_grad"):
        (x * 2)[0] = 1.0
    constant = Tensor(np.zeros(2))
    constant[1] = Tensor(np.array(4.0))
    assert constant.data[1] == 4


def test_requires_grad_belongs_to_leaves():
    y = leaf(1) * 2
    with pytest.raises(RuntimeError, match="leaves only"):
        y.requires_grad = False
    with pytest.raises(RuntimeError, match="needs a leaf"):
        y.register_post_accumulate_grad_hook(same)
    assert y.requires_grad and not y.detach().requires_grad and y.item() == 2
    assert "requires_grad" in repr(y) and "requires_grad" not in repr(y.detach())


# ------------------------------------------------------------------------ hooks, deferred gradients

def test_hooks_fire_once_after_the_last_use():
    x, w = leaf([1.0, 2]), leaf([3.0, 4])
    seen = []
    for t, name in ((x, "x"), (w, "w")):
        t.register_post_accumulate_grad_hook(
            lambda t, name=name: seen.append((name, t.grad.copy())))
    h = x * w
    ((h * h).sum() + (w * 2).sum() * 0).backward()
    assert [name for name, _ in seen] == ["x", "w"]
    assert np.array_equal(seen[0][1], x.grad) and np.array_equal(seen[1][1], w.grad)
    handle = w.register_post_accumulate_grad_hook(lambda t: seen.append(("again", t.grad)))
    handle.remove()
    (w * 1).sum().backward()
    assert [name for name, _ in seen] == ["x", "w", "w"]


def test_hook_order_is_the_reverse_of_use():
    ws = [leaf(2) for _ in range(4)]
    order = []
    for i, w in enumerate(ws):
        w.register_post_accumulate_grad_hook(lambda t, i=i: order.append(i))
    y = leaf(1) * 1
    for w in ws:
        y = y * w
    y.backward()
    assert order == [3, 2, 1, 0]


def test_after_backward_runs_once_at_the_end():
    x, w = leaf(1), leaf(2)
    log = []

    def hook(t):
        T.after_backward(lambda: log.append(("end", x.grad is not None and w.grad is not None)))
        log.append("hook")
    x.register_post_accumulate_grad_hook(hook)
    w.register_post_accumulate_grad_hook(hook)
    (x * 3 * w).backward()
    assert log == ["hook", "hook", ("end", True), ("end", True)]
    with pytest.raises(RuntimeError, match="outside of a backward"):
        T.after_backward(same)


def test_after_backward_waits_for_the_outermost():
    """A recomputation runs a backward inside a backward."""
    x, log = leaf(1), []

    def vjp(g):
        inner = leaf(3)
        inner.register_post_accumulate_grad_hook(
            lambda t: T.after_backward(lambda: log.append(x.grad is not None)))
        (inner * 2).backward()
        log.append("inner done")
        return (g,)
    Tensor(x.data, (x,), vjp).backward()
    assert log == ["inner done", True]


def test_a_failed_backward_forgets_its_callbacks():
    x, w, log = leaf(1), leaf(2), []
    w.register_post_accumulate_grad_hook(lambda t: T.after_backward(lambda: log.append(1)))

    def fail(g):
        raise OSError("no")
    with pytest.raises(OSError):
        (Tensor(x.data, (x,), fail) * w).backward()
    (x * 2).backward()
    assert log == []


def test_deferred_gradients_come_later_and_once():
    x, w, late, fired = leaf([1.0, 2]), leaf([3.0, 4]), [], []
    w.register_post_accumulate_grad_hook(lambda t: (fired.append(t.grad.copy()),
                                                    T.after_backward(lambda: fired.append("end"))))

    def times(a):
        ad = a.data
        return Tensor(ad * w.data, (a, w), lambda g: (g * w.data, lambda: g * ad))
    (times(times(x)) + w).backward(np.ones(2), defer=late)  # two thunks and one array for w
    assert np.array_equal(x.grad, w.data ** 2) and w.grad is None and not fired
    T.run_deferred(late)
    assert not late and len(fired) == 2 and fired[1] == "end"
    assert np.array_equal(w.grad, 2 * x.data * w.data + 1)
    assert np.array_equal(fired[0], w.grad)


def test_thunks_run_only_if_wanted():
    x, frozen, ran = leaf(1), leaf(2), []
    frozen.requires_grad = False
    Tensor(x.data, (x, frozen), lambda g: (lambda: g + 1, lambda: ran.append(1))).backward()
    assert x.grad == 2 and not ran
    y = x * 1                                               # not a leaf: never deferred
    x.grad = None
    Tensor(y.data, (y,), lambda g: (lambda: g + 1,)).backward(defer=ran)
    assert x.grad == 2 and not ran


def test_replay_and_no_grad_are_nested_and_per_thread():
    assert T.is_grad_enabled() and not T.replaying()
    seen = []
    with no_grad(), T.replay():
        with no_grad():
            pass
        assert not T.is_grad_enabled() and T.replaying()
        thread = threading.Thread(target=lambda: seen.append((T.is_grad_enabled(), T.replaying())))
        thread.start()
        thread.join()
    assert seen == [(True, False)] and T.is_grad_enabled() and not T.replaying()


# ------------------------------------------------------------------------ memory

def test_graph_bytes_counts_buffers_once():
    x, w = leaf(np.ones((4, 8))), leaf(np.ones((4, 8)))
    assert graph_bytes(x) == graph_bytes(x + w) == 0        # an addition keeps nothing
    y = x * w
    assert graph_bytes(y) == 512 and graph_bytes(y, exclude=[w]) == 256
    a, b = y[:2], y[2:]
    z = a * b                                               # two views of one buffer
    assert graph_bytes(z, exclude=[x, w]) == 256
    e = z.exp()
    assert graph_bytes(e, exclude=[x, w]) == 256 + 128
    assert graph_bytes(e, -z, exclude=[x, w]) == 256 + 128
    e.sum().backward()
    assert graph_bytes(e) == 0


def test_graph_bytes_looks_into_closures():
    x, kept, more = leaf(np.ones(4)), np.ones(100), np.ones(5)

    def vjp(g, pairs, default=more):
        return (lambda: x.data * late[0],)
    pairs = [(kept[:50], {"a": Part((1,), 0, np.ones(3))})]
    made = Tensor(x.data, (x,), functools.partial(vjp, pairs=pairs))
    late = (np.ones(7),)
    assert graph_bytes(made) == 8 * (100 + 3 + 5 + 7 + 4)


def test_backward_frees_as_it_goes():
    """When the first layer's vjp runs, what the last layer kept is gone."""
    x, alive = leaf(np.ones(4)), []

    def layer(a):
        saved = np.ones(1000)
        alive.append(weakref.ref(saved))

        def vjp(g):
            counts.append(sum(r() is not None for r in alive))
            return (g * saved[0],)
        return Tensor(a.data, (a,), vjp)
    y, counts = x, []
    for _ in range(4):
        y = layer(y)
    y.sum().backward()
    assert counts == [4, 3, 2, 1] and not any(r() is not None for r in alive)


def test_what_a_vjp_returned_dies_before_the_next_runs():
    """Also what its thunks captured: at most one node's arrays are alive at a time."""
    w, alive, counts = leaf(np.ones(4)), [], []

    def layer(a):
        def vjp(g):
            counts.append(sum(r() is not None for r in alive))
            work = np.ones(1000)
            alive.append(weakref.ref(work))
            return g * 1, lambda: work[:4] * 1
        return Tensor(a.data, (a, w), vjp)
    y = leaf(np.ones(4))
    for _ in range(3):
        y = layer(y)
    y.sum().backward()
    assert counts == [0, 0, 0] and (w.grad == 3).all()


def test_results_nobody_needs_die_at_once():
    x = leaf(np.ones(1000))
    y = x + 1
    sum_of_two = weakref.ref(y.data)
    z = y + 1                                               # keeps the node of y, not its data
    del y
    assert sum_of_two() is None and z.node.parents[0].parents[0] is x


def test_the_engine_needs_no_mpi():
    code = ("import sys; sys.modules['mpi4py'] = None\n"
            "import minidist.engine.tensor, minidist.engine.functional\n"
            "import os; print(os.environ['OPENBLAS_NUM_THREADS'])")
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0 and done.stdout.strip() == "1", done.stderr
