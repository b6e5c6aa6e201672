"""Recomputation: the same gradients bit for bit, alone and on ranks; what is kept, and computed."""
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from lessons import counted

from minidist import BadInput, cost, ledger, parallel, recompute, verify
from minidist.engine.data import random_batch
from minidist.engine.functional import add_auxiliary_loss, auxiliary_losses, gelu
from minidist.engine.functional import scaled_dot_product_attention as attend
from minidist.engine.optim import SGD, AdamW
from minidist.engine.tape import forget, scale_losses
from minidist.engine.tensor import Tensor, graph_bytes, no_grad, replaying, run_deferred
from minidist.mesh import DeviceMesh
from minidist.ranks.comm import run_threads
from minidist.recompute import checkpoint
from minidist.step import train_step
from tests.gradcheck import check_op
from tests.layout import check_layout
from tests.models import tiny
from tests.mpi import mpi

SIZES = dict(layers=5, dropout=0.2)


def leaves(*shapes):
    rng = np.random.default_rng(0)
    return [Tensor(rng.standard_normal(shape), requires_grad=True) for shape in shapes]


def gradients(what, **sizes):
    """Loss and all gradients of one backward."""
    model = verify.perturb(tiny(**{**SIZES, **sizes}))
    if what:
        what(model)
    loss = model(random_batch(13, 8, 3, seed=1, step=2))
    loss.backward()
    return [loss.data, *(p.grad for p in model.parameters())]


def same(found, reference):
    for a, b in zip(found, reference, strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------ any function of Tensors

def test_gradients_by_central_differences():
    w = Tensor(np.arange(6.0).reshape(3, 2) / 10, requires_grad=True)
    check_op(lambda x, y: checkpoint(lambda a, b: (a @ w).tanh() * b, x, y), (4, 3), (4, 2))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_checkpoints_inside_of_checkpoints(depth):
    (x, w), calls = leaves((4, 3), (3, 3)), []

    def f(a):
        calls.append(1)
        return (a @ w).tanh()

    def nested(a, left):
        return checkpoint(lambda b: nested(b, left - 1), a) if left else f(a)

    nested(x * 2.0, depth).sum().backward()
    assert len(calls) == depth + 1
    found, x.grad, w.grad = [x.grad, w.grad], None, None
    f(x * 2.0).sum().backward()
    same(found, [x.grad, w.grad])


def test_a_leaf_is_delivered_once_however_many_segments_use_it():
    (x, w), fired = leaves((4, 3), (3, 3)), []
    w.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.copy()))
    y = x
    for _ in range(3):
        y = checkpoint(lambda a: (a @ w).tanh(), y)
    y.sum().backward()
    assert len(fired) == 1
    np.testing.assert_array_equal(fired[0], w.grad)


def test_what_draws_names_its_generator():
    rng, (x,) = np.random.default_rng(3), leaves((50,))
    y = checkpoint(lambda a: a * rng.standard_normal(50), x * 1.0, rng=rng)
    after = rng.standard_normal()
    y.sum().backward()
    again = np.random.default_rng(3)
    np.testing.assert_array_equal(x.grad, again.standard_normal(50))
    assert (after, rng.standard_normal()) == (again.standard_normal(), again.standard_normal())


def test_a_leaf_as_an_argument_an_unused_one_and_a_constant():
    x, w, unused = leaves((4, 3), (3, 3), (2,))
    constant = np.ones((4, 3))
    checkpoint(lambda a, b, c, d: (a + c) @ b, x * 1.0, w, constant, unused).sum().backward()
    np.testing.assert_allclose(w.grad, np.tile((x.data + 1).sum(0)[:, None], 3), rtol=1e-14)
    assert unused.grad is None and constant.all()


def test_nothing_to_compute_again():
    (x,) = leaves((3,))
    y = x * 1.0
    assert checkpoint(lambda a: a, y) is y and checkpoint(lambda a: a, x) is x
    assert checkpoint(lambda a: a * 2.0, x.detach()).node is None
    with no_grad():
        assert checkpoint(lambda a: a * 2.0, y).node is None


def test_a_tensor_from_outside_must_be_an_argument():
    (x,) = leaves((3,))
    y = x * 2.0
    with pytest.raises(ValueError, match="pass it as an argument"):
        checkpoint(lambda a: a * y, x * 3.0)


def test_what_was_changed_in_between_is_noticed():
    x, w = leaves((4, 3), (3, 3))
    y = checkpoint(lambda a: a @ w, x)
    w.data += 1
    w.changed()
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_what_only_backward_needs_is_not_made_the_first_time(dtype):
    """The slope of a gelu, the weights of attention; what comes out is the same bit for bit."""
    x = Tensor(np.linspace(-5, 5, 2 * 3 * 70 * 4).reshape(2, 3, 70, 4).astype(dtype))
    x.requires_grad = True

    def f(x):
        return attend(gelu(x), x, x)

    with forget():
        y = f(x)
    assert graph_bytes(y, exclude=[x]) < graph_bytes(f(x), exclude=[x])
    np.testing.assert_array_equal(y.data, f(x).data)
    f(x).sum().backward()
    expected, x.grad = x.grad, None
    checkpoint(lambda x: checkpoint(f, x), x).sum().backward()             # of which one is inside
    np.testing.assert_array_equal(x.grad, expected)


def test_backward_inside_no_grad_and_put_off():
    x, w = leaves((4, 3), (3, 3))
    loss, late = checkpoint(lambda a: (a @ w).tanh(), x).sum(), []
    with no_grad():
        loss.backward(defer=late)
    assert x.grad is not None and w.grad is None
    run_deferred(late)
    found, w.grad = w.grad, None
    (x @ w).tanh().sum().backward()
    np.testing.assert_array_equal(found, w.grad)


def test_gradients_of_two_leaves_are_never_one_array():
    a, b, x = leaves((3,), (3,), (3,))
    (checkpoint(lambda x: x + a + b, x * 1.0) * 2.0).sum().backward()
    assert not np.shares_memory(a.grad, b.grad)


def test_an_auxiliary_loss_counts_once_and_is_scaled():
    (x,) = leaves((3,))

    def f(a):
        return add_auxiliary_loss(a, (a * a).sum())

    with auxiliary_losses() as sums, scale_losses(4):
        checkpoint(f, x * 1.0).sum().backward()
    assert sums == {"auxiliary": (x.data ** 2).sum()}
    np.testing.assert_allclose(x.grad, 4 * (1 + 2 * x.data), rtol=1e-14)


# ------------------------------------------------------------------ in a GPT

WAYS = {"blocks": lambda m: recompute.parallelize(m, "blocks"),
        "sqrt": lambda m: recompute.parallelize(m, "sqrt"),
        "every 2": lambda m: recompute.segments(m, 2), "all": lambda m: recompute.segments(m, 9),
        "attention": recompute.selective,
        "both": lambda m: recompute.segments(recompute.selective(m), 2)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_the_same_bit_for_bit(way, tied):
    same(gradients(WAYS[way], tied=tied), gradients(None, tied=tied))


@pytest.mark.parametrize("way, calls", [("blocks", 1), ("sqrt", 1), ("all", 1), ("attention", 0)])
def test_every_block_runs_once_more(way, calls):
    model, count = tiny(**SIZES), []
    for block in model.blocks:
        block.mlp.wrap(lambda forward, x: count.append(1) or forward(x))
    WAYS[way](model)
    loss = model(random_batch(13, 8, 3, seed=1, step=2))
    assert len(count) == 5
    loss.backward()
    assert len(count) == 5 * (1 + calls)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("layers, every", [(1, 1), (4, 1), (4, 2), (5, 3), (5, 5)])
def test_live_activations_equal_the_formula(layers, every, dropout):
    model, tops = tiny(layers=layers, dropout=dropout), []
    batch = random_batch(13, 8, 3, seed=1, step=2)
    known = ledger.known(model, batch)

    def watch(forward, x, batch):
        y = forward(x, batch)
        if replaying():                                     # x stands for the segment's own input
            held = graph_bytes(y, *map(ledger.rooted, graph), exclude=known)
            tops.append(held + x.data.nbytes)
        return y

    last = [model.blocks[min(i + every, layers) - 1] for i in range(0, layers, every)]
    for block in last:
        block.wrap(watch)
    recompute.segments(model, every)
    loss = model(batch)
    graph = ledger.nodes(loss)
    sizes = cost.Sizes.of(model.config, B=3, w=8)
    end, top = cost.recomputed_activations(sizes, every, batch.count)
    assert graph_bytes(loss, exclude=known) == end
    loss.backward()
    assert max(end, *tops) == top


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_selective_keeps_no_weights(dropout, groups):
    model = recompute.selective(tiny(layers=3, dropout=dropout, kv_heads=groups))
    batch = random_batch(13, 8, 3, seed=1, step=2)
    sizes = cost.Sizes.of(model.config, B=3, w=8)
    held = graph_bytes(model(batch), exclude=ledger.known(model, batch))
    assert held == cost.selective_activations(sizes, batch.count)


@pytest.mark.parametrize("layers, lengths", [(1, [1]), (4, [2, 2]), (5, [3, 2]), (9, [3, 3, 3])])
def test_segments_of_the_square_root(layers, lengths):
    model = recompute.parallelize(tiny(layers=layers), "sqrt")
    assert [len(getattr(part, "blocks", [part])) for part in model.blocks] == lengths


def test_refused():
    with pytest.raises(BadInput, match="use one of blocks, sqrt, attention"):
        recompute.parallelize(tiny(), "all")
    with pytest.raises(BadInput, match="use 1 or more"):
        recompute.segments(tiny(), 0)


# ------------------------------------------------------------------ on ranks

LAYOUTS = [dict(tp=2), dict(tp=2, sequence="again"), dict(tp=2, sequence="keep"), dict(dp=2),
           dict(dp=3, zero=1), dict(dp=2, zero=2), dict(dp=2, zero=3), dict(cp=2),
           dict(dp=2, tp=2, sequence="again", zero=3), dict(cp=2, dp=2, zero=2)]
AXES = "dp", "tp", "cp"


def trained(comm, options, what, make):
    options = dict(options, recompute=what)
    mesh = DeviceMesh(comm, **{axis: options.pop(axis, 1) for axis in AXES})
    model = parallel.spread(verify.perturb(tiny(layers=3, heads=6, kv_heads=6, width=24, vocab=14,
                                                dropout=0.2)), mesh, **options)
    optimizer = parallel.equip(make(model.parameters()), model)
    for step in range(2):
        train_step(model, random_batch(14, 8, 6, seed=1, step=step, ragged=True), optimizer, mesh,
                   2, 0.5)
    return [x for p in model.parameters() for x in (p.data, p.grad, *optimizer.state[p.name])]


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_bitwise_neutral_under_every_layout(options):
    ranks = np.prod([options.get(axis, 1) for axis in AXES])
    for make in (partial(SGD, lr=0.5, momentum=0.9), partial(AdamW, lr=0.01, eps=1e-5)):
        plain = run_threads(ranks, trained, options, None, make)
        for what in ("blocks", "sqrt") + ("cp" not in options) * ("attention",):
            for a, b in zip(run_threads(ranks, trained, options, what, make), plain):
                same(a, b)


@pytest.mark.parametrize("what, options", [
    ("blocks", dict(dp=2, zero=3, microbatches=2)), ("sqrt", dict(dp=2, tp=2)),
    ("attention", dict(tp=2)), ("blocks", dict(pp=2, microbatches=3)),
    ("blocks", dict(pp=2, microbatches=4, schedule="zb-h1", layers=4))])
def test_the_same_training_as_one_process(what, options):
    options = dict(options)
    strategy = partial(parallel.spread, recompute=what, zero=options.pop("zero", None),
                       schedule=options.pop("schedule", None))
    check_layout(strategy, 2, dropout=0.1, kv_heads=4, equip=equip, **options)


@mpi(2)
def test_the_same_over_mpi(comm):
    options = dict(tp=2, sequence="again")
    plain = trained(comm, options, None, partial(SGD, lr=0.5))
    for what in recompute.WHAT:
        same(trained(comm, options, what, partial(SGD, lr=0.5)), plain)


def equip(optimizer, model, mesh):
    return parallel.equip(optimizer, model)


def flags(**given):
    usual = dict(dp=None, cp=None, tp=None, pp=None, sp=None, batch=12, attention="full",
                 cp_method="zigzag", recompute=None)
    return SimpleNamespace(**{**usual, **given})


@pytest.mark.parametrize("given", [
    dict(recompute="attention", attention="tiled"), dict(recompute="attention", cp=2),
    dict(recompute="sqrt", pp=2)])
def test_what_does_not_go_together_is_refused(given):
    world = SimpleNamespace(size=2, rank=0)
    with pytest.raises(BadInput, match="use --recompute blocks"):
        parallel.make_mesh(flags(**given), world)


def test_segments_of_a_pipeline_are_refused():
    def rank(comm):
        model = parallel.spread(tiny(layers=4), DeviceMesh(comm, pp=2))
        with pytest.raises(BadInput, match="use --recompute blocks"):
            recompute.segments(model, 2)
    run_threads(2, rank)


@pytest.mark.parametrize("what", recompute.WHAT)
def test_flops_equal_the_formula(what):
    batch, products = random_batch(13, 8, 3, seed=1, step=2), []
    for way in (None, what):
        model = tiny(layers=4, kv_heads=4)
        if way:
            recompute.parallelize(model, way)
        products.append(sum(n for n, _ in counted.step(model, batch)))
    sizes = cost.Sizes.of(model.config, B=3, w=8)
    means = 0 if what == "attention" else 4 * sizes.L * sizes.N * sizes.D     # of layer_norm
    assert products[1] - products[0] == cost.recomputed_flops(sizes, what) + means
