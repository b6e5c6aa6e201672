"""Sequence parallelism: the same training on T/p tokens per rank, at the price that cost says."""
import numpy as np
import pytest

from minidist import BadInput, collectives, cost, dp, ledger, sp, tp, verify
from minidist.collectives import chosen
from minidist.engine import attention
from minidist.engine.data import random_batch
from minidist.engine.tensor import Tensor, graph_bytes
from minidist.mesh import DeviceMesh
from minidist.placement import finalize
from minidist.ranks.buffers import PAGE
from minidist.ranks.comm import run_threads
from tests.layout import OPTIMIZERS, check_layout
from tests.models import perturb, tiny
from tests.mpi import mpi

SIZES = dict(heads=12, width=24, context=12, kv_heads=12)      # tokens and heads over 1 to 4


def cut(model, comm, keep_input=False):
    return sp.parallelize(tp.parallelize(model, comm, sp.enter, sp.leave), comm, keep_input)


def over_sp(model, mesh):
    return dp.parallelize(cut(model, mesh["tp"]), mesh["dp"])


def over_sp_keeping(model, mesh):
    return dp.parallelize(cut(model, mesh["tp"], keep_input=True), mesh["dp"])


# ------------------------------------------------------------------ the whole model

@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", [over_sp, over_sp_keeping])
def test_training_equals_one_process(strategy, p):
    check_layout(strategy, tp=p, steps=5, **SIZES)


@pytest.mark.parametrize("p, config", [(4, dict(tied=False, vocab=17, kv_heads=2)),
                                       (8, dict(heads=8, context=8, kv_heads=2))])
def test_untied_and_with_shared_groups(p, config):
    check_layout(over_sp, tp=p, **{**SIZES, **config})


@pytest.mark.parametrize("p", [2, 3])
def test_with_data_parallelism(p):
    check_layout(over_sp, tp=p, dp=2, microbatches=2, **SIZES)


def test_a_replica_without_rows():
    check_layout(over_sp, tp=2, dp=2, rows=1, **SIZES)


@mpi(4)
def test_training_under_mpi(comm):
    batches = [random_batch(13, 12, 5, seed=7, step=t) for t in range(3)]
    for strategy, sizes in ((over_sp, dict(tp=4)), (over_sp_keeping, dict(tp=2, dp=2))):
        verdict = verify.train(lambda: perturb(tiny(dropout=0.2, **SIZES)), OPTIMIZERS["SGD"],
                               strategy, DeviceMesh(comm, **sizes), batches, max_norm=0.5)
        assert verdict.equal, verdict.line()


def gradient_of_input(comm, build):
    """The gradient of what the blocks are given, whole, on each rank."""
    model, seen = build(perturb(tiny(dropout=0.2, **SIZES)), comm), []

    def around(forward, x, batch):
        def note(g):
            seen.append(g.copy())
            return (g,)
        return forward(Tensor(x.data, (x,), note), batch)

    model.parts["blocks.0"].wrap(around)
    batch = model.localize(random_batch(13, 12, 3, seed=1, step=0))
    model(batch).backward()
    assert seen[0].shape[1] == len(batch.stream)
    return collectives.all_gather(seen[0], comm, 1)


@pytest.mark.parametrize("p", [2, 4])
def test_the_gradient_of_the_input(p):
    ref = run_threads(1, gradient_of_input, lambda model, comm: model)[0]
    for got in run_threads(p, gradient_of_input, cut):
        np.testing.assert_allclose(got, ref, rtol=0, atol=1e-12 * np.abs(ref).max())


# ------------------------------------------------------------------ what is partial

def test_D08_gradients_of_3_and_5_are_8_on_both_ranks():
    """A sum, not a mean: the last norm, a row-parallel layer's bias, positions."""
    names = "head.norm.weight", "blocks.0.norm1.bias", "blocks.1.mlp.fc2.bias", "embed.wpe.weight"

    def fn(world):
        mesh = DeviceMesh(world, tp=2)
        params = {p.name: p for p in cut(tiny(**SIZES), mesh["tp"]).parameters()}
        for name in names:
            params[name].grad = np.full(params[name].shape, (3.0, 5.0)[world.rank])
        finalize([params[name] for name in names], mesh, 1)
        return [set(params[name].grad.flat) for name in names]
    assert run_threads(2, fn) == [[{8.0}] * len(names)] * 2


def test_D08_every_parameter_and_gradient_after_ten_steps():
    """Against one process, and bitwise on the ranks that hold the same."""
    verdict = verify.layout(over_sp, tp=2, steps=10, make_optimizer=OPTIMIZERS["SGD"], **SIZES)
    assert verdict.equal and verdict.steps == 10, verdict.line()


def test_D08_everything_that_is_not_cut_is_summed_over_the_group():
    """Norms, the last one too, row biases and positions: each rank's gradient is a part."""
    def fn(comm):
        model = cut(perturb(tiny(**SIZES)), comm)
        assert all(("tp" in p.partial) != ("tp" in p.placements) for p in model.parameters())
        model(model.localize(random_batch(13, 12, 3, seed=1, step=0))).backward()
        partial = {p.name: p.grad.copy() for p in model.parameters() if p.partial}
        finalize(model.parameters(), DeviceMesh(comm, tp=comm.size), 1)
        return partial, {p.name: p.grad for p in model.parameters() if p.partial}

    def named(comm):                                           # a group that is called tp
        return fn(comm.split(0, name="tp"))

    (part0, whole0), (part1, whole1) = run_threads(2, named)
    for name in part0:
        assert not np.array_equal(part0[name], part1[name])
        assert np.array_equal(whole0[name], whole1[name])
        assert np.array_equal(whole0[name], part0[name] + part1[name])
    assert {"embed.wpe.weight", "head.norm.weight", "blocks.0.mlp.fc2.bias"} <= part0.keys()


# ------------------------------------------------------------------ counted

@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("keep_input", [False, True])
def test_messages_and_bytes(p, keep_input):
    """Per layer 4 all_gathers and 4 reduce_scatters; 2 all_gathers more if inputs are not kept."""
    L, batch = 3, random_batch(13, 12, 5, seed=1, step=0)

    def fn(comm):
        model = cut(tiny(**SIZES), comm, keep_input)
        with comm.counting() as forward:
            loss = model(model.localize(batch))
        with comm.counting() as backward:
            loss.backward()
        return forward, backward

    again, sizes = 0 if keep_input else 1, cost.Sizes.of(tiny(**SIZES).config, B=5, w=8)
    for rank, (there, back) in enumerate(run_threads(p, fn)):
        calls = [{k: c.calls for k, c in counted.by_label.items()} for counted in (there, back)]
        assert calls[0] == {"all_gather": 2 * L + 1, "reduce_scatter": 2 * L + 1, "all_reduce": 3}
        assert calls[1] == {"all_gather": (2 + 2 * again) * L + 1 + again,
                            "reduce_scatter": 2 * L + 1}
        forward, backward = cost.sp(sizes, cost.Group(p, rank, chosen), keep_input)
        assert (there.messages, there.bytes) == (forward.messages, forward.bytes)
        assert (back.messages, back.bytes) == (backward.messages, backward.bytes)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("way", ["tp", "keep", "again"])
def test_activations_kept_by_a_block(p, way):
    """Counted from the graph: inside / p under TP, everything / p under SP but for kept inputs."""
    def fn(comm):
        model = tiny(dropout=0.2, **SIZES)
        if way == "tp":
            tp.parallelize(model, comm)
        else:
            cut(model, comm, keep_input=way == "keep")
        batch = model.localize(random_batch(13, 12, 5, seed=1, step=0))
        x = Tensor(np.ones((5, len(batch.stream), 24)), requires_grad=True)
        return graph_bytes(model.blocks[0](x, batch), exclude=ledger.known(model, batch))

    sizes = cost.Sizes.of(tiny(**SIZES).config, B=5, w=8, tile=attention.TILE, dropout=True)
    kept = cost.tp_block_activations(sizes, p, sequence=None if way == "tp" else way)
    slack = 2 * PAGE if way == "keep" else 0                   # of two received arrays
    assert run_threads(p, fn) == [sum(row.bytes for row in kept) + slack] * p


def test_a_frozen_matrix_is_not_gathered_for():
    def fn(comm):
        model = cut(tiny(**SIZES), comm)
        for block in model.blocks:
            block.mlp.fc1.weight.requires_grad = False
        loss = model(model.localize(random_batch(13, 12, 5, seed=1, step=0)))
        with comm.counting() as backward:
            loss.backward()
        return backward.by_label["all_gather"].calls
    assert run_threads(2, fn) == [3 * 3 + 2] * 2


# ------------------------------------------------------------------ refused

def test_tokens_that_do_not_split_are_refused_on_every_rank_before_any_message():
    def fn(comm):
        model = tp.parallelize(tiny(**{**SIZES, "context": 13}), comm, sp.enter, sp.leave)
        with comm.counting() as counted:
            with pytest.raises(BadInput, match="13 tokens do not split over 3 ranks.* 12 or 15"):
                sp.parallelize(model, comm)
        return counted.messages
    assert run_threads(3, fn) == [0] * 3


def test_a_shorter_batch_that_does_not_split_is_refused_too():
    def fn(comm):
        model = cut(tiny(**SIZES), comm)
        with pytest.raises(BadInput, match="11 tokens do not split over 2 ranks"):
            model.localize(random_batch(13, 11, 3, seed=1, step=0))
        return True
    assert run_threads(2, fn) == [True] * 2


def test_the_pair_must_be_in_the_layers():
    def fn(comm):
        with pytest.raises(ValueError, match="sp.enter, sp.leave"):
            sp.parallelize(tp.parallelize(tiny(), comm), comm)
        return True
    assert run_threads(2, fn) == [True] * 2
