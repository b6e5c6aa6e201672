"""Expert parallelism against one process, and its messages against cost."""
import sys
from functools import partial

import numpy as np
import pytest

from minidist import (BadInput, cost, cp, dp, ep, moe, parallel, pp, recompute, sp, tp, train,
                      verify, zero)
from minidist.collectives import all_gather
from minidist.dp import DistributedDataParallel
from minidist.engine.data import random_batch
from minidist.engine.gpt import GPT, GPTConfig
from minidist.engine.nn import Module
from minidist.engine.optim import SGD
from minidist.engine.tape import scale_losses
from minidist.engine.tensor import Tensor, no_grad
from minidist.mesh import DeviceMesh
from minidist.placement import finalize
from minidist.ranks import launch
from minidist.ranks.comm import run_threads
from minidist.step import train_step
from tests.mpi import execute, need_mpi


def prepare(model, skew=None, **routing):
    """Give a small GPT experts and leave no zero anywhere; skew: the router's logits."""
    moe.replace_mlps(model, moe.MoEConfig(**{"experts": 4, "top_k": 2, **routing}), seed=1)
    verify.perturb(model)
    for layer in moe.mixtures(model) if skew is not None else ():
        layer.router.data[...] = 0
        layer.bias.data[...] = skew
    return model


def spread(model, mesh, stage=0, **options):
    if mesh["tp"].size > 1:
        tp.parallelize(model, mesh["tp"])
    ep.parallelize(model, mesh["ep"])
    if mesh["cp"].size > 1:
        cp.parallelize(model, mesh["cp"])
    if mesh["pp"].size > 1:
        pp.split(model, mesh["pp"], **options)
    if mesh["dp"].size == 1:
        return model
    if stage:
        return zero.parallelize(model, mesh["dp"], stage)
    return DistributedDataParallel(model, mesh["dp"])


def sgd(params):
    return SGD(params, 0.05, momentum=0.9)


def verdict(routing=None, stage=0, options=None, **layout):
    return verify.layout(partial(spread, stage=stage, **options or {}),
                         (lambda o, model, mesh: parallel.equip(o, model)),
                         prepare=partial(prepare, **routing or {}), **layout).line()


SIZES = [dict(dp=1), dict(dp=2), dict(dp=2, ep=2), dict(dp=4, ep=2), dict(dp=4, ep=4),
         dict(dp=2, ep=2, tp=2), dict(tp=2), dict(dp=2, ep=2, cp=2), dict(dp=3, ep=3)]


@pytest.mark.parametrize("make_optimizer", [None, sgd])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_training_equals_one_process(sizes, make_optimizer):
    line = verdict(make_optimizer=make_optimizer, **sizes)
    assert line.startswith("EQUIVALENT"), line


ROUTING = {"balance loss": dict(aux=0.1), "z loss": dict(z=0.1), "bias": dict(bias=0.01),
           "shared": dict(shared=True), "one each": dict(top_k=1), "five": dict(experts=5),
           "all go to one": dict(bias=0.01, top_k=1, skew=(9, 0, 0, 0)),
           "one rank gets nothing": dict(bias=0.01, skew=(0, 0, 9, 9))}         # D35


@pytest.mark.parametrize("name", ROUTING)
@pytest.mark.parametrize("sizes", [dict(dp=2, ep=2, tp=2), dict(dp=4, ep=2)], ids=str)
def test_any_routing(name, sizes):
    line = verdict(ROUTING[name], make_optimizer=sgd, **sizes)
    assert line.startswith("EQUIVALENT"), line


@pytest.mark.parametrize("sizes", [dict(dp=2, ep=2), dict(dp=4, ep=2), dict(dp=2, ep=2, tp=2)],
                         ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_beside_zero(stage, sizes):
    line = verdict(dict(bias=0.01), stage, num_microbatches=2, **sizes)
    assert line.startswith("EQUIVALENT"), line


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_in_a_pipeline(schedule):
    line = verdict(dict(bias=0.01), options=dict(schedule=schedule), dp=2, ep=2, pp=2,
                   num_microbatches=3)
    assert line.startswith("EQUIVALENT"), line


@pytest.mark.parametrize("what", ["blocks", "attention"])
def test_computed_again_in_backward(what):
    def again(model, mesh):
        return DistributedDataParallel(recompute.parallelize(
            ep.parallelize(model, mesh["ep"]), what), mesh["dp"])
    line = verify.layout(again, prepare=partial(prepare, bias=0.01, aux=0.1), dp=4, ep=2).line()
    assert line.startswith("EQUIVALENT"), line


@pytest.mark.parametrize("rows", [1, 3])
def test_ranks_without_tokens(rows):
    """D35: fewer rows than ranks."""
    line = verdict(dict(bias=0.01), rows=rows, num_microbatches=2, dp=4, ep=2)
    assert line.startswith("EQUIVALENT"), line



# --------------------------------------------------------------------------- one layer

ONE = GPTConfig(vocab=1, context=1, width=6, heads=1, layers=1)


class Layer(Module):
    """A model that is one mixture of experts; parameters are the same on all ranks."""

    def __init__(self, width=6, **routing):
        config = GPTConfig(vocab=1, context=1, width=width, heads=1, layers=1)
        self.localizers = []
        self.layer = moe.MoE("m", moe.MoEConfig(**{"experts": 5, **routing}), config, 0, float)
        verify.perturb(self.layer, 0.5)

    def forward(self, x):
        return self.layer(x)


def drawn(rank, n=7):
    return np.random.default_rng(rank).standard_normal((1, n, 6))


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("counts", ["drawn", "none", "all to the last"])
def test_rows_arrive_in_expert_order_and_come_back_where_they_were(p, counts):
    """D35: also without any rows; experts that do nothing make of dispatch and combine nothing."""
    def fn(comm):
        rng, held = np.random.default_rng(comm.rank), [2, 1, 3, 1][:p]
        mine = {"drawn": rng.integers(0, 4, sum(held)), "none": np.zeros(sum(held), int),
                "all to the last": np.eye(sum(held), dtype=int)[-1] * 5}[counts]
        expert = np.repeat(np.arange(sum(held)), mine)
        rows = Tensor(np.stack([expert, rng.random(len(expert))], 1), requires_grad=True)

        def forward(rows, counts):
            first = sum(held[:comm.rank])
            own = np.repeat(np.arange(first, first + held[comm.rank]), counts)
            assert rows.data[:, 0].tolist() == own.tolist()
            return rows * 1
        y = ep.travel(forward, rows, mine, comm, held)
        g = rng.random(y.shape)
        y.backward(g)
        assert np.array_equal(y.data, rows.data) and np.array_equal(rows.grad, g)
    run_threads(p, fn)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_every_row_sent_is_predicted(p):
    def fn(world):
        model = ep.parallelize(Layer(top_k=2), DeviceMesh(world, dp=p, ep=p)["ep"])
        held = cost.chunks(5, p)
        sizes, group = cost.Sizes(T=7, D=6, H=1, V=1, L=1, w=8), cost.Group(p, world.rank)
        with world.counting() as forward:
            y = model(Tensor(drawn(world.rank), requires_grad=True))
        with world.counting() as backward:
            y.backward(np.ones(y.shape))
        there = ep.sums(model.layer.counts, held)
        back = all_gather(np.array(there)[None], world)[:, world.rank].tolist()
        price = cost.ep(there, back, held, sizes, group)
        for count, predicted in zip((forward, backward), price):
            assert (count.messages, count.bytes) == predicted[1:]
        if p > 1:
            assert forward.by_label["counts"].bytes == 8 * (5 - held[world.rank])
    run_threads(p, fn)


@pytest.mark.parametrize("drop", ["probability", "position"])
def test_capacity_is_that_of_each_rank(drop):
    """Each rank drops what one process with its tokens alone would drop."""
    routing = dict(capacity=0.7, drop=drop, top_k=2)

    def fn(world):
        x, alone, model = drawn(world.rank), Layer(**routing), Layer(**routing)
        ep.parallelize(model, DeviceMesh(world, dp=3, ep=3)["ep"])
        ran, inner = [], model.layer.experts.forward
        model.layer.experts.forward = lambda rows, counts: ran.append(counts) or inner(rows, counts)
        np.testing.assert_allclose(model(Tensor(x)).data, alone(Tensor(x)).data, atol=1e-14)
        limit = moe.places(7, model.layer.routing)
        kept = np.minimum(all_gather(model.layer.counts[None], world), limit).sum(0)
        assert model.layer.counts.sum() == 14 and model.layer.counts.max() > limit
        assert np.array_equal(all_gather(ran[0], world, sizes=[2, 2, 1]), kept)
    run_threads(3, fn)


def test_the_bias_is_the_same_on_all_ranks():
    """It moves by what all ranks have seen in all passes of a step; not by what is repeated."""
    def fn(world):
        model = Layer(bias=0.01)
        ep.parallelize(model, DeviceMesh(world, dp=4, ep=2)["ep"])
        before, seen = model.layer.bias.data.copy(), 0
        for i in range(2):
            recompute.checkpoint(model, Tensor(drawn(world.rank + 9 * i), requires_grad=True)
                                 ).backward(np.ones((1, 7, 6)))
            seen = seen + all_gather(model.layer.counts[None], world).sum(0)
        with no_grad():
            model(Tensor(drawn(world.rank)))
        assert model.layer.seen.sum() == 2 * 7
        model.layer.rebalance()
        assert seen.sum() == 4 * 7 * 2 and len(set(seen)) > 1
        np.testing.assert_allclose(model.layer.bias.data - before,
                                   0.01 * np.sign(seen.mean() - seen))
        assert not model.layer.seen.any()
    run_threads(4, fn)


def test_a_step_moves_the_bias():
    def fn(world):
        mesh, config = DeviceMesh(world, dp=2, ep=2), GPTConfig(7, 8, 8, 2, 1)
        model = spread(prepare(GPT(config, dtype=float), bias=0.01), mesh)
        bias = moe.mixtures(model)[0].bias
        before, batch = bias.data.copy(), random_batch(7, 8, 3, 0, 0)
        train_step(model, batch, sgd(model.parameters()), mesh)
        moved = bias.data - before
        assert np.abs(moved).max() > 0 and bias.grad is None
        np.testing.assert_allclose(np.abs(moved), 0.01 * (moved != 0))
        assert np.ptp(all_gather(bias.data[None], world), 0).max() == 0
    run_threads(2, fn)


@pytest.mark.parametrize("p, ep_size", [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
def test_each_token_counts_once_for_an_expert(p, ep_size):
    """D36: one token x on each rank, all to expert 0, loss = mean over tokens of its result."""
    def fn(world):
        mesh = DeviceMesh(world, dp=p, ep=ep_size)
        model = ep.parallelize(Layer(experts=4, bias=0.1), mesh["ep"])
        dp.parallelize(model, mesh["dp"])
        model.layer.bias.data[:] = 9, 0, 0, 0
        model(Tensor(drawn(0, 1))).backward(np.ones((1, 1, 6)))
        finalize(model.parameters(), mesh, count=p)
        alone = Layer(experts=4, bias=0.1)
        alone.layer.bias.data[:] = 9, 0, 0, 0
        alone(Tensor(drawn(0, 1))).backward(np.ones((1, 1, 6)))
        theirs = {q.name: q.grad for q in alone.parameters()}
        for q in model.parameters():
            if q.requires_grad:
                own = q.placements.get("ep")
                np.testing.assert_allclose(q.grad, own.cut(theirs[q.name]) if own else
                                           theirs[q.name], atol=1e-12)
    run_threads(p, fn)


def router_gradient(p, passes, scale=1.0):
    """Gradient of the balance loss per token, for `passes` copies of the same rows on each rank."""
    def fn(world):
        mesh = DeviceMesh(world, dp=p)
        model = dp.parallelize(ep.parallelize(Layer(aux=0.1), mesh["ep"]), mesh["dp"])
        for _ in range(passes):
            y = model(Tensor(drawn(0)))
            with scale_losses(scale):
                (y * 0.0).sum().backward()
        finalize(model.parameters(), mesh, count=7 * passes * p * scale)
        return model.layer.router.grad
    return run_threads(p, fn)[0]


def test_the_balance_loss_weighs_the_same_however_often_it_is_taken():
    """D37: copies of a batch in passes, on ranks; a loss scale."""
    once = router_gradient(1, 1)
    assert np.abs(once).max() > 1e-4
    for case in (1, 4), (2, 1), (4, 2), (1, 1, 1024.0):
        np.testing.assert_allclose(router_gradient(*case), once, rtol=1e-12, err_msg=str(case))


def test_what_cannot_be_shared_out_is_refused():
    def fn(world):
        mesh = DeviceMesh(world, dp=2, ep=2)
        with pytest.raises(BadInput, match="2 ranks.*each of 1 experts.*--ep 1"):
            ep.parallelize(Layer(experts=1), mesh["ep"])
        with pytest.raises(BadInput, match="no experts.*--experts"):
            ep.parallelize(GPT(ONE), mesh["ep"])
        model = moe.replace_mlps(GPT(GPTConfig(3, 4, 8, 2, 1)), moe.MoEConfig(experts=2))
        with pytest.raises(BadInput, match="leave out --sp"):
            tp.parallelize(model, DeviceMesh(world, tp=2)["tp"], sp.enter, sp.leave)
    run_threads(2, fn)


# --------------------------------------------------------------------------- the command

SHORT = ["--preset", "lesson", "--layers", "2", "--steps", "2", "--batch", "4", "--sample", "0",
         "--no-figure"]


def test_training_with_experts_over_ranks_is_verified():
    need_mpi()
    status, out = execute(launch.command(4, [
        sys.executable, "-m", "minidist.train", *SHORT, "--experts", "4", "--ep", "2", "--tp", "2",
        "--zero", "1", "--recompute", "blocks", "--verify"]))
    assert status == 0 and "EQUIVALENT" in out and "4 experts" in out, out


@pytest.mark.parametrize("given, words", [
    (["--ep", "2"], "--ep is about experts.*--experts E"),
    (["--top-k", "2"], "--top-k is about experts"),
    (["--experts", "4", "--sp", "--tp", "2"], "--sp would give a router only some"),
    (["--experts", "4", "--ep", "2", "--zero", "3", "--offload", "."], "--offload moves what"),
    (["--experts", "4", "--ep", "3"], "3 ranks that share the experts do not divide the 1 of dp"),
    (["--experts", "2", "--top-k", "3"], "top_k = 3 of 2 experts"),
    (["--experts", "2", "--capacity", "0"], "capacity = 0.0: use a factor above 0"),
    (["--experts", "2", "--balance", "aux", "--verify", "--grad-accum", "2"], "2 passes make up"),
    (["--experts", "2", "--capacity", "1", "--verify", "--grad-accum", "2"], "--capacity counts")])
def test_flags_that_do_not_go_together(given, words):
    with pytest.raises(BadInput, match=words):
        train.build(train.options([*SHORT, *given]))


@pytest.mark.parametrize("given, kept", [
    ([], (2, None, 0, 1e-3, False)),
    (["--top-k", "1", "--balance", "aux", "--shared-expert"], (1, None, 1e-2, 0, True)),
    (["--capacity", "1.25", "--balance", "none"], (2, 1.25, 0, 0, False))])
def test_what_the_flags_say_of_the_router(given, kept):
    r = moe.asked(train.options(["--experts", "4", *given]))
    assert (r.top_k, r.capacity, r.aux, r.bias, r.shared) == kept
