"""Tensor parallelism: every layer, the loss and the whole model against one process."""
import functools
from types import SimpleNamespace

import numpy as np
import pytest

from minidist import BadInput, cost, dp, mappings, sp, tp, verify
from minidist.collectives import chosen
from minidist.engine import functional, nn
from minidist.engine.data import random_batch
from minidist.engine.functional import IGNORE
from minidist.engine.tensor import Tensor
from minidist.mesh import DeviceMesh
from minidist.placement import join
from minidist.ranks.comm import run_threads
from tests.layout import OPTIMIZERS, check_layout
from tests.models import perturb, tiny
from tests.mpi import mpi

PAIRS = {"plain": (mappings.copy_to, mappings.reduce_from), "sp": (sp.enter, sp.leave),
         "sp, gathered again": (sp.enter, sp.leave)}


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def linear(out, inner, bias=True):
    """A Linear whose bias is not zero: zero hides a bias that is added twice."""
    layer = nn.Linear("layer", out, inner, dtype=np.float64, std=1.0, bias=bias)
    if bias:
        layer.bias.data[...] = draw(out)
    return layer


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1, np.abs(b).max()))


# ------------------------------------------------------------------ one layer

def column(layer, comm, mode):
    parts = np.array_split(np.arange(layer.weight.shape[0]), comm.size)
    layer = tp.ColumnParallelLinear(layer, parts, comm, PAIRS[mode][0])
    if mode == "sp, gathered again":
        layer.wrap(functools.partial(sp.gather_again, layer))
    return layer


def row(layer, comm, mode):
    parts = np.array_split(np.arange(layer.weight.shape[1]), comm.size)
    return tp.RowParallelLinear(layer, parts, comm, PAIRS[mode][1])


X, G = draw(2, 12, 8, seed=1), draw(2, 12, 7, seed=2)          # [B, T, D], gradient of [B, T, F]


def serial(build):
    layers, x = build(), Tensor(X, requires_grad=True)
    y = x
    for layer in layers:
        y = layer(y) if len(layers) == 1 or layer is layers[-1] else functional.gelu(layer(y))
    y.backward(G.copy())
    return SimpleNamespace(y=y.data, x=x.grad, params=[p.grad for m in layers
                                                       for p in m.parameters()])


def gathered(p, comm, mode):
    """The global gradient of a parameter, completed where sequence parallelism left it partial."""
    if mode != "plain" and comm.name not in p.placements:
        return mappings.reduce_from(Tensor(p.grad), comm).data
    return join(p, p.grad)


def tokens(x, comm, mode):
    return x if mode == "plain" else mappings.split(Tensor(x), comm, 1).data


def whole_tokens(x, comm, mode):
    return x if mode == "plain" else mappings.gather(Tensor(x), comm, 1).data


def parallel_column(comm, mode):
    layer = column(linear(7, 8), comm, mode)
    x = Tensor(tokens(X, comm, mode), requires_grad=True)
    y = layer(x)
    y.backward(mappings.split(Tensor(G), comm, 2).data)
    return SimpleNamespace(y=mappings.gather(y, comm, 2, tp.chunks(7, comm.size)).data,
                           x=whole_tokens(x.grad, comm, mode),
                           params=[gathered(p, comm, mode) for p in layer.parameters()])


def parallel_row(comm, mode):
    layer = row(linear(7, 8), comm, mode)
    x = Tensor(mappings.split(Tensor(X), comm, 2).data, requires_grad=True)
    y = layer(x)
    y.backward(tokens(G, comm, mode))
    return SimpleNamespace(y=whole_tokens(y.data, comm, mode),
                           x=mappings.gather(Tensor(x.grad), comm, 2, tp.chunks(8, comm.size)).data,
                           params=[gathered(p, comm, mode) for p in layer.parameters()])


def parallel_chain(comm, mode):
    first, second = column(linear(5, 8), comm, mode), row(linear(7, 5), comm, mode)
    x = Tensor(tokens(X, comm, mode), requires_grad=True)
    y = second(functional.gelu(first(x)))
    y.backward(tokens(G, comm, mode))
    return SimpleNamespace(y=whole_tokens(y.data, comm, mode), x=whole_tokens(x.grad, comm, mode),
                           params=[gathered(p, comm, mode) for m in (first, second)
                                   for p in m.parameters()])


LAYERS = {"column": (lambda: [linear(7, 8)], parallel_column),
          "row": (lambda: [linear(7, 8)], parallel_row),
          "column, gelu, row": (lambda: [linear(5, 8), linear(7, 5)], parallel_chain)}


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", PAIRS)
@pytest.mark.parametrize("name", LAYERS)
def test_D10_a_layer_is_the_serial_one_forward_and_backward(name, mode, p):
    build, fn = LAYERS[name]
    ref = serial(build)
    for got in run_threads(p, fn, mode):
        close(got.y, ref.y)
        close(got.x, ref.x)
        for a, b in zip(got.params, ref.params, strict=True):
            close(a, b)


@pytest.mark.parametrize("mode", PAIRS)
def test_D09_a_row_bias_is_added_once(mode):
    """x = [1, 1], W = [1, 2], b = 10: y is 13, and 23 if both ranks add the bias."""
    def fn(comm):
        layer = nn.Linear("layer", 1, 2, dtype=np.float64)
        layer.weight.data[...], layer.bias.data[...] = [[1, 2]], 10
        layer = row(layer, comm, mode)
        y = layer(Tensor(np.ones((1, 2, 1)), requires_grad=True))
        y.backward(np.ones(y.shape))
        return y.data.ravel().tolist(), layer.bias.grad.tolist()

    tokens_per_rank = 2 if mode == "plain" else 1
    assert run_threads(2, fn) == [([13.0] * tokens_per_rank, [float(tokens_per_rank)])] * 2


# ------------------------------------------------------------------ the vocabulary

def embedded(comm, vocab, ids, mode="plain"):
    table = nn.Embedding("table", vocab, 3, dtype=np.float64)
    table.weight.data[...] = draw(vocab, 3)
    parts = np.array_split(np.arange(vocab), comm.size)
    layer = tp.VocabParallelEmbedding(table, parts, comm, PAIRS[mode][1])
    y = layer(ids)
    y.backward(np.ones(y.shape))
    return y.data, join(layer.weight, layer.weight.grad)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_D15_every_word_is_found_by_exactly_one_rank(p):
    ids = np.array([[0, 3, 4, 4], [2, 1, 0, 3]])               # V=5 over 2: 0 1 2 | 3 4
    for y, grad in run_threads(p, embedded, 5, ids):
        assert np.array_equal(y, draw(5, 3)[ids]) and grad.shape == (5, 3)    # no padded rows
        assert np.array_equal(grad[:, 0], np.bincount(ids.ravel(), minlength=5))


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("bad", [5, -1])
def test_D15_an_unknown_word_is_refused_on_every_rank_before_any_message(p, bad):
    def fn(comm):
        with comm.counting() as counted:
            with pytest.raises(IndexError, match="vocabulary of 5"):
                embedded(comm, 5, np.array([[0, bad]]))
            with pytest.raises(IndexError, match="vocabulary of 5"):
                sizes = tp.chunks(5, comm.size)
                logits = Tensor(np.zeros((1, 2, sizes[comm.rank])))
                tp.vocab_parallel_cross_entropy(logits, np.array([[0, bad]]), comm, sizes)
        return counted.messages
    assert run_threads(p, fn) == [0] * p


def split_loss(comm, logits, targets):
    """The loss of one rank's piece of the logits; -> loss, gathered gradient, what was sent."""
    sizes = tp.chunks(logits.shape[-1], comm.size)
    mine = Tensor(mappings.split(Tensor(logits), comm, logits.ndim - 1).data, requires_grad=True)
    with comm.counting() as counted:
        loss = tp.vocab_parallel_cross_entropy(mine, targets, comm, sizes)
        loss.backward()
    grad = mappings.gather(Tensor(mine.grad), comm, logits.ndim - 1, sizes).data
    return loss.item(), grad, counted


def whole_loss(logits, targets):
    logits = Tensor(logits, requires_grad=True)
    loss = functional.cross_entropy(logits, targets)[0]
    loss.backward()
    return loss.item(), logits.grad


LOGITS = draw(2, 6, 13)
BORDERS = np.array([[0, 12, 6, 7, IGNORE, 5], [4, 3, 9, 10, 8, IGNORE]])   # V=13 over 2, 3, 4


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("scale", [1, 1e4])
def test_the_split_loss_is_the_loss(p, scale):
    ref, ref_grad = whole_loss(LOGITS * scale, BORDERS)
    for loss, grad, _ in run_threads(p, split_loss, LOGITS * scale, BORDERS):
        assert abs(loss - ref) <= 1e-13 * abs(ref)
        close(grad, ref_grad)
        assert np.abs(grad.sum(-1)).max() < 1e-12


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_certain_word_costs_nothing_and_the_others_everything(dtype):
    logits = np.full((1, 2, 4), -1e4, dtype)
    logits[:, :, 1] = 1e4
    for loss, grad, _ in run_threads(2, split_loss, logits, np.array([[1, 2]])):
        assert loss == 2e4 and grad.dtype == dtype
        assert np.array_equal(grad, [[[0, 0, 0, 0], [0, 1, -1, 0]]])


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_only_differences_between_logits_count(shift):
    for loss, grad, _ in run_threads(2, split_loss, np.full((1, 1, 4), shift), np.array([[3]])):
        assert abs(loss - np.log(4)) < 1e-15
        assert np.array_equal(grad, [[[0.25, 0.25, 0.25, -0.75]]])


def test_D15_padding_does_not_enter_the_softmax():
    """V=5 over 2 ranks, all logits 0: the loss is ln 5, not the ln 6 of a padded vocabulary."""
    for loss, _, _ in run_threads(2, split_loss, np.zeros((1, 1, 5)), np.array([[3]])):
        assert abs(loss - np.log(5)) < 1e-15


def test_no_target_no_loss():
    targets = np.full((2, 6), IGNORE)
    for loss, grad, _ in run_threads(3, split_loss, LOGITS, targets):
        assert loss == 0 and not grad.any()


def test_more_ranks_than_words():
    ref, ref_grad = whole_loss(LOGITS[..., :3], BORDERS % 3)
    for loss, grad, _ in run_threads(4, split_loss, LOGITS[..., :3], BORDERS % 3):
        assert abs(loss - ref) < 1e-13
        close(grad, ref_grad)


def test_the_loss_sends_three_numbers_per_token():
    for _, _, counted in run_threads(2, split_loss, LOGITS, BORDERS):
        assert counted.by_label.keys() == {"all_reduce"} and counted.calls == 3
        assert counted.bytes == 3 * BORDERS.size * 8           # one rank's copy of each, p = 2


# ------------------------------------------------------------------ the plan

GROUPED = [(p, heads, groups) for p in (1, 2, 3, 4, 6, 8) for heads in (4, 6, 8, 12, 16)
           for groups in (1, 2, 3, 4, 6, 8) if heads % groups == 0 and heads % p == 0
           and (groups % p == 0 or p % groups == 0)]


def shape(heads, groups, e=3):
    return tiny(heads=heads, kv_heads=groups, width=heads * e, layers=1).config


@pytest.mark.parametrize("p, heads, groups", GROUPED)
def test_every_row_of_the_fused_matrix_lies_on_one_rank(p, heads, groups):
    config = shape(heads, groups)
    parts = tp.head_rows(config, p)
    rows = groups * (heads // groups + 2) * 3
    assert len(parts) == p
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(rows))


def test_a_rank_holds_the_rows_of_its_heads():
    """4 heads, 2 groups of [q q k v], 1 row per head: ranks share a group from 4 on."""
    config = shape(4, 2, e=1)
    assert [p.tolist() for p in tp.head_rows(config, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [p.tolist() for p in tp.head_rows(config, 4)] == [[0, 2, 3], [1], [4, 6, 7], [5]]


def test_every_matrix_of_the_model_is_in_the_plan():
    """What is not cut is what the plan leaves whole on purpose: norms, row biases, positions."""
    model = run_threads(2, lambda comm: tp.parallelize(tiny(), comm))[0]
    whole = {p.name.split(".", 2)[-1] if "blocks" in p.name else p.name
             for p in model.parameters() if not p.placements}
    assert whole == {"embed.wpe.weight", "norm1.weight", "norm1.bias", "norm2.weight",
                     "norm2.bias", "attn.proj.bias", "mlp.fc2.bias", "head.norm.weight",
                     "head.norm.bias"}


@pytest.mark.parametrize("over", [{}, dict(tied=False), dict(kv_heads=1, vocab=11)])
def test_D13_initial_weights_do_not_depend_on_the_number_of_ranks(over):
    """Gathered, they are bitwise the plain model's (D33, too); a tied weight is cut once."""
    def fn(comm):
        np.random.seed(comm.rank)                              # no one else's generator matters
        params = tp.parallelize(tiny(**over), comm).parameters()
        return {p.name: join(p, p.data) for p in params}

    ref = {p.name: p.data for p in tiny(**over).parameters()}
    for p in (1, 2, 4):
        for full in run_threads(p, fn):
            assert full.keys() == ref.keys()
            assert all(np.array_equal(full[name], ref[name]) for name in ref)


def test_objects_names_and_ties_survive():
    def fn(comm):
        model = tiny()
        before = {p.name: p for p in model.parameters()}
        tp.parallelize(model, comm)
        assert all(before[p.name] is p for p in model.parameters())
        assert model.parts["head"].out.weight is model.parts["embed"].wte.weight
        return True
    assert run_threads(2, fn) == [True, True]


@pytest.mark.parametrize("p, over, numbers", [
    (3, {}, "4 heads with 2 key/value heads do not split over 3 ranks; use --tp 1, 2, 4"),
    (8, dict(kv_heads=4), "4 heads do not split over 8 ranks; use --tp 1, 2, 4"),
    (4, dict(heads=12, kv_heads=6, width=12), "12 heads with 6 key/value heads do not split"),
])
def test_heads_that_do_not_split_are_refused_on_every_rank_before_any_message(p, over, numbers):
    def fn(comm):
        with comm.counting() as counted, pytest.raises(BadInput, match=numbers):
            tp.parallelize(tiny(**over), comm)
        return counted.messages
    assert run_threads(p, fn) == [0] * p


def test_dropout_differs_between_heads_and_agrees_where_replicated():
    """Each rank drops what one process drops at its heads, whatever a global generator does."""
    def fn(comm):
        if comm.rank == 0:
            np.random.rand()
        model = tp.parallelize(tiny(dropout=0.5), comm)
        block, rows = model.blocks[0], np.arange(4)
        mine = block.attn.drop.mask(0, np.float64, rows, block.attn.heads, rows, rows)
        return mine, block.drop1.mask(0, np.float64, rows, rows, rows)

    ref = tiny(dropout=0.5).blocks[0].attn.drop.mask(0, np.float64, *[np.arange(4)] * 4)
    results = run_threads(2, fn)
    assert np.array_equal(np.concatenate([mine for mine, _ in results], 1), ref)
    assert not np.array_equal(results[0][0], results[1][0])
    assert np.array_equal(results[0][1], results[1][1])


# ------------------------------------------------------------------ the whole model

def over_tp(model, mesh):
    return dp.parallelize(tp.parallelize(model, mesh["tp"]), mesh["dp"])


GROUPS = dict(heads=12, width=24, context=6)                   # 12 heads: over 1, 2, 3 and 4


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("config", [dict(kv_heads=12), dict(kv_heads=1, tied=False, vocab=17)])
def test_training_equals_one_process(p, config):
    """Odd vocabulary, dropout, tied and untied; each rank its groups, or one shared by all."""
    check_layout(over_tp, tp=p, steps=5, **GROUPS, **config)


@pytest.mark.parametrize("p", [2, 3])
def test_with_data_parallelism(p):
    check_layout(over_tp, tp=p, dp=2, steps=5, **GROUPS, kv_heads=12, microbatches=2)


@pytest.mark.parametrize("p, groups", [(4, 2), (8, 2), (8, 8)])
def test_fewer_groups_than_ranks(p, groups):
    check_layout(over_tp, tp=p, heads=8, width=24, kv_heads=groups)


@pytest.mark.parametrize("p", [2, 4])
def test_a_replica_without_rows(p):
    """One row for two replicas: the second works on nothing, and still takes part."""
    check_layout(over_tp, tp=p, dp=2, rows=1, heads=8, width=24, kv_heads=2)


def input_gradients(model, into):
    """Write down the gradient of the residual stream where it enters the first block."""
    def around(forward, x, batch):
        def note(g):
            into.append(g.copy())
            return (g,)
        return forward(Tensor(x.data, (x,), note), batch)
    model.parts["blocks.0"].wrap(around)


def gradient_of_input(comm, cut):
    """The gradient of what the blocks are given, whole, on each rank."""
    model, seen = cut(perturb(tiny(heads=12, width=24, dropout=0.2)), comm), []
    input_gradients(model, seen)
    model(model.localize(random_batch(13, 8, 3, seed=1, step=0))).backward()
    return seen[0]


@pytest.mark.parametrize("p", [2, 4])
def test_the_gradient_of_the_input_is_whole_on_every_rank(p):
    ref = run_threads(1, gradient_of_input, lambda model, comm: model)[0]
    for got in run_threads(p, gradient_of_input, tp.parallelize):
        close(got, ref)


def test_logits_are_whole_when_asked_for():
    def fn(comm, cut):
        model = cut(perturb(tiny()), comm)
        return model.logits(random_batch(13, 8, 3, seed=1, step=0)).data

    ref = run_threads(1, fn, lambda model, comm: model)[0]
    for got in run_threads(2, fn, tp.parallelize):
        close(got, ref)


@mpi(4)
def test_training_under_mpi(comm):
    model = dict(dropout=0.2, heads=12, width=24, kv_heads=2)
    batches = [random_batch(13, 8, 5, seed=7, step=t) for t in range(3)]
    for sizes in (dict(tp=4), dict(tp=2, dp=2)):
        verdict = verify.train(lambda: perturb(tiny(**model)), OPTIMIZERS["SGD"], over_tp,
                               DeviceMesh(comm, **sizes), batches, max_norm=0.5)
        assert verdict.equal, verdict.line()


# ------------------------------------------------------------------ counted

def counted_step(comm, cut, config, batch):
    """Forward and backward, each with what this rank sent; -> two Counted"""
    model = cut(tiny(**config), comm)
    with comm.counting() as forward:
        loss = model(model.localize(batch))
    with comm.counting() as backward:
        loss.backward()
    return forward, backward


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("layers", [1, 3])
def test_two_all_reduces_per_layer_and_direction(p, layers):
    """And one for the embedding, one for the head, three small ones for the loss."""
    config = dict(heads=12, width=24, layers=layers, kv_heads=12)
    sizes = cost.Sizes.of(tiny(**config).config, B=5, w=8)
    batch = random_batch(13, 8, 5, seed=1, step=0)
    results = run_threads(p, counted_step, tp.parallelize, config, batch)
    for rank, (there, back) in enumerate(results):
        assert there.by_label.keys() == back.by_label.keys() == {"all_reduce"}
        assert there.calls == 2 * layers + 1 + 3
        assert back.calls == 2 * layers + 1
        forward, backward = cost.tp(sizes, cost.Group(p, rank, chosen))
        assert (there.messages, there.bytes) == (forward.messages, forward.bytes)
        assert (back.messages, back.bytes) == (backward.messages, backward.bytes)


def test_sharing_a_key_costs_one_gather_per_layer_and_direction():
    """8 ranks, 2 groups, heads 3 wide: four ranks share a key, one of them with no slice of it."""
    config = dict(heads=8, width=24, kv_heads=2)
    batch = random_batch(13, 8, 5, seed=1, step=0)
    sizes = cost.Sizes.of(tiny(**config).config, B=5, w=8)
    for rank, counted in enumerate(run_threads(8, counted_step, tp.parallelize, config, batch)):
        prices = cost.tp(sizes, cost.Group(8, rank, chosen))
        assert [(c.messages, c.bytes) for c in counted] == [price[1:] for price in prices]
        keys = cost.tp_keys(sizes, cost.Group(8, rank, chosen))
        assert [c.by_group["world.kv"].bytes for c in counted] == [price.bytes for price in keys]


@pytest.mark.parametrize("p, config", [(2, {}), (4, {}), (4, dict(tied=False)),
                                       (3, dict(heads=3, kv_heads=1, width=12)),
                                       (8, dict(heads=8, width=24, kv_heads=2))])
def test_parameters_held(p, config):
    def fn(comm):
        return sum(x.data.size for x in tp.parallelize(tiny(**config), comm).parameters())
    sizes = cost.Sizes.of(tiny(**config).config)
    assert run_threads(p, fn) == [cost.tp_parameters(sizes, cost.Group(p, rank))
                                  for rank in range(p)]
