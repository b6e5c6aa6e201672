"""The step's seams: passes, the model's own mesh, deferred weight passes, several forwards.

As a user of all of them, a naive pipeline: one stage at work at a time, with and without DDP.
"""
from functools import partial

import numpy as np
import pytest

from minidist import dp, mappings, mesh, placement, sp, tp
from minidist.engine.data import random_batch
from minidist.engine.nn import Linear
from minidist.engine.optim import SGD, AdamW
from minidist.engine.tensor import run_deferred
from minidist.mesh import DeviceMesh
from minidist.ranks.comm import run_threads
from minidist.step import summed, train_step
from tests.layout import check_layout
from tests.models import perturb, tiny

some = partial(dp.DistributedDataParallel, bucket_bytes=9000, first_bucket_bytes=2000)
FORMS = {"plain": dp.parallelize, "ddp": some}


# ------------------------------------------------------------------------ a naive pipeline

def stages(model, grid):
    """Keep my stage's parts; say which stages hold what."""
    comm = grid["pp"]
    cut = np.array_split(list(model.parts), comm.size)
    holders = {}
    for stage, names in enumerate(cut):
        for p in {p for name in names for p in model.parts[name].parameters()}:
            holders.setdefault(p, []).append(stage)
    ends = comm.split(comm.rank in (0, comm.size - 1))
    alone = comm.split(comm.rank)
    for p, where in holders.items():
        p.placements["pp"] = placement.Held(where, ends if len(where) > 1 else alone)
        if len(where) > 1:
            p.partial.add("pp")
    model.parts = {name: model.parts[name] for name in cut[comm.rank]}
    mesh.adopt(model, comm)
    return model


def one_by_one(model, batches, put_off=False):
    """Run each micro-batch through all stages and back before the next."""
    comm, loss = model.mesh["pp"], 0.0
    for batch in batches:
        shape = len(batch.rows), len(batch.stream), model.config.width
        x = comm.rank and mappings.recv(shape, np.float64, comm, comm.rank - 1)
        y, later = model(batch, x), []
        if comm.rank == comm.size - 1:
            loss += y.item()
            y.backward(defer=later if put_off else None)
        else:
            token = mappings.send(y, comm, comm.rank + 1)
            token.backward(np.empty(0), defer=later if put_off else None)
        run_deferred(later)
    return loss


def piped(model, grid, form=dp.parallelize):
    return form(stages(model, grid), grid["dp"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pp, replicas, tied, put_off", [
    (1, 1, True, True), (2, 1, True, False), (3, 1, False, False), (2, 2, True, True),
    (3, 2, False, True), (4, 1, True, True)])
def test_a_pipeline_equals_one_process(form, pp, replicas, tied, put_off):
    check_layout(partial(piped, form=FORMS[form]), pp=pp, dp=replicas, tied=tied, microbatches=2,
                 passes=partial(one_by_one, put_off=put_off), steps=2)


def test_every_rank_can_gather_what_one_stage_holds():
    def fn(world):
        grid = DeviceMesh(world, pp=2, tp=2)
        model = stages(tp.parallelize(perturb(tiny()), grid["tp"]), grid)
        return placement.everything(model.parameters(), grid), len(model.parameters())

    reference = {p.name: p.data for p in perturb(tiny()).parameters()}
    for found, own in run_threads(4, fn):
        assert found.keys() == reference.keys() and own < len(reference)
        assert all(np.array_equal(found[name], reference[name]) for name in reference)


def test_the_loss_is_summed_over_stages_and_the_targets_are_not():
    def fn(world):
        grid = DeviceMesh(world, pp=2, dp=2)
        last = grid.coords["pp"] == 1
        return summed(5.0 + grid.coords["dp"] if last else 0.0, 3 + grid.coords["dp"], grid)
    assert run_threads(4, fn) == [(11.0, 7)] * 4


# ------------------------------------------------------------------- weight passes put off

def deferring(model, batches):
    """All backwards first, each without its weight gradients; then the weight passes."""
    loss, queues = 0.0, []
    for batch in batches:
        queues.append([])
        y = model(batch)
        y.backward(defer=queues[-1])
        loss += y.item()
    for queue in queues:
        run_deferred(queue)
    return loss


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (2, 1), (3, 2)])
def test_deferred_weight_passes_equal_one_process(form, ranks, microbatches):
    check_layout(lambda model, grid: FORMS[form](model, grid["dp"]), dp=ranks, passes=deferring,
                 microbatches=microbatches, steps=2)


def gradients(ranks, work, rows=5, **sizes):
    """Run work(model, batch), without a step.  -> each rank's {name: gradient}"""
    def fn(world):
        model = some(perturb(tiny()), DeviceMesh(world, dp=ranks)["dp"])
        work(model, random_batch(13, 8, rows, 1, 0))
        return {p.name: p.grad for p in model.parameters()}
    return run_threads(ranks, fn)


def alone(work, rows=5):
    model = perturb(tiny())
    work(model, random_batch(13, 8, rows, 1, 0))
    return {p.name: p.grad for p in model.parameters()}


def put_off(model, batch):
    later = []
    model(batch).backward(defer=later)
    run_deferred(later)


WORKS = {"global batch": lambda model, batch: model(batch).backward(),
         "two forwards, one backward": lambda m, b: (m(b) + m(b) * 2.0).backward(),
         "two halves": lambda m, b: (m(b.split(2)[0]) + m(b.split(2)[1])).backward(),
         "weight pass put off": put_off}


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_backward_without_a_step_equals_one_process(work, ranks):
    """A model is called with the global batch, and narrows it; gradients are sums when it ends."""
    reference = alone(WORKS[work])
    for found in gradients(ranks, WORKS[work]):
        for name, ref in reference.items():
            np.testing.assert_allclose(found[name], ref, rtol=0, atol=1e-12 * np.abs(ref).max())


# ------------------------------------------------------------------- the model and its mesh

def over_sp(model, grid):
    return sp.parallelize(tp.parallelize(model, grid["tp"], sp.enter, sp.leave), grid["tp"])


@pytest.mark.parametrize("strategy, sizes", [
    (lambda model, grid: some(model, grid["dp"]), dict(dp=2)),
    (lambda model, grid: dp.parallelize(model, grid["dp", "cp"]), dict(dp=2, cp=2)),
    (lambda model, grid: some(model, grid["dp", "cp"]), dict(dp=3, cp=1)),
    (over_sp, dict(tp=2)),
    (lambda model, grid: some(over_sp(model, grid), grid["dp"]), dict(dp=2, tp=2))])
def test_a_step_without_a_mesh_is_taken_on_the_models(strategy, sizes):
    def fn(world, spread):
        grid = DeviceMesh(world, **sizes) if spread else None
        model = perturb(tiny())
        model = strategy(model, grid) if spread else model
        optimizer = SGD(model.parameters(), 0.1)
        steps = [train_step(model, random_batch(13, 8, 5, 1, t), optimizer) for t in range(2)]
        return [number for step in steps for number in (step.loss, step.norm)]

    [reference] = run_threads(1, fn, False)
    for found in run_threads(int(np.prod(list(sizes.values()))), fn, True):
        np.testing.assert_allclose(found, reference, rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_rows_over_two_axes_equal_one_process(form):
    check_layout(lambda model, grid: FORMS[form](model, grid["dp", "cp"]), dp=2, cp=2, steps=2)


@pytest.mark.parametrize("form", FORMS)
def test_a_group_that_is_no_axis_of_the_mesh_is_refused(form):
    def fn(world):
        grid = DeviceMesh(world, dp=2)
        model = FORMS[form](tiny(), world)
        for where in (None, grid):
            with pytest.raises(ValueError, match="spread over world, which is no axis of Device"):
                train_step(model, random_batch(13, 8, 4, 0, 0), SGD(model.parameters(), 0.1), where)
        return True
    assert run_threads(2, fn) == [True] * 2


def test_another_mesh_is_refused():
    def fn(world):
        model = dp.parallelize(tiny(), DeviceMesh(world, dp=2)["dp"])
        with pytest.raises(ValueError, match="spread over .*dp=2.*, not over .*tp=2"):
            train_step(model, random_batch(13, 8, 4, 0, 0), SGD(model.parameters(), 0.1),
                       DeviceMesh(world, tp=2))
        with pytest.raises(ValueError, match="lies on .* already"):
            tp.parallelize(model, DeviceMesh(world, tp=2)["tp"])
        return True
    assert run_threads(2, fn) == [True] * 2


def test_logits_of_a_spread_model_are_those_of_the_plain_one():
    def fn(world):
        grid = DeviceMesh(world, dp=2, tp=2)
        model = some(over_sp(perturb(tiny()), grid), grid["dp"])
        return model.logits(random_batch(13, 8, 3, 1, 0)).data

    reference = perturb(tiny()).logits(random_batch(13, 8, 3, 1, 0)).data
    for found in run_threads(4, fn):
        np.testing.assert_allclose(found, reference, rtol=0, atol=1e-12)


# ------------------------------------------------------------------- what goes wrong is named

def test_D2_what_was_unfrozen_after_wrapping_is_named():
    def fn(world):
        model = tiny()
        model.blocks[1].norm1.weight.requires_grad = False
        model = some(model, DeviceMesh(world, dp=2)["dp"])
        model.blocks[1].norm1.weight.requires_grad = True
        with pytest.raises(RuntimeError, match="blocks.1.norm1.weight was added, rep"):
            train_step(model, random_batch(13, 8, 4, 0, 0), SGD(model.parameters(), 0.1))
        return True
    assert run_threads(2, fn) == [True] * 2


def test_D2_what_was_replaced_after_wrapping_is_named():
    """A new head of the same name: nobody would sum its gradient."""
    def fn(world):
        model = some(tiny(tied=False), DeviceMesh(world, dp=2)["dp"])
        model.parts["head"].out = Linear("head.out", 13, model.config.width, bias=False,
                                         dtype=np.float64)
        with pytest.raises(RuntimeError, match="head.out.weight was added, replaced"):
            train_step(model, random_batch(13, 8, 4, 0, 0), SGD(model.parameters(), 0.1))
        return True
    assert run_threads(2, fn) == [True] * 2


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_D3_a_gradient_that_is_no_number_moves_nothing(bad):
    """Planted on the last rank only: all ranks raise, and the next step is the right one."""
    def fn(world, spoil):
        model = some(perturb(tiny()), DeviceMesh(world, dp=2)["dp"])
        optimizer = AdamW(model.parameters(), 0.1)
        first, second = (random_batch(13, 8, 4, 0, step) for step in (0, 1))
        train_step(model, first, optimizer)
        if spoil:
            def plant(p):
                p.grad[...] = bad if world.rank == 1 else p.grad

            bias = model.blocks[1].norm1.bias
            bias.hooks.insert(0, plant)
            with pytest.raises(FloatingPointError, match="nothing has changed"):
                train_step(model, first, optimizer)
            bias.hooks.remove(plant)
        return train_step(model, second, optimizer), optimizer.t

    assert run_threads(2, fn, True) == run_threads(2, fn, False)


def test_nothing_is_left_over_from_a_step_that_failed():
    """D4: a hook raises on all ranks while buckets are on a slow link; the next step is right."""
    def fn(world, fails):
        model = some(perturb(tiny()), DeviceMesh(world, dp=2)["dp"])
        optimizer = SGD(model.parameters(), 0.1)

        def fail(p):
            raise ZeroDivisionError

        if fails:
            hook = model.blocks[1].norm1.weight.register_post_accumulate_grad_hook(fail)
            for one in (lambda b: train_step(model, b, optimizer),
                        lambda b: model(b).backward()):
                model.zero_grad()
                with pytest.raises(ZeroDivisionError):
                    one(random_batch(13, 8, 4, 0, 0))
                assert model.works
            hook.remove()
        return train_step(model, random_batch(13, 8, 4, 0, 1), optimizer, num_microbatches=2)

    slow = [run_threads(2, fn, fails, link=(0.01, np.inf)) for fails in (True, False)]
    assert slow[0] == slow[1]


def test_a_closed_one_sums_no_more():
    def fn(world):
        with DeviceMesh(world, dp=2) as grid:
            with some(perturb(tiny()), grid["dp"]) as model:
                train_step(model, random_batch(13, 8, 4, 0, 0), SGD(model.parameters(), 0.1))
            with pytest.raises(RuntimeError, match="closed"):
                train_step(model, random_batch(13, 8, 4, 0, 0), SGD(model.parameters(), 0.1))
            model.close()
        with pytest.raises(ValueError, match="closed"):
            grid["dp"].barrier()
        grid.close()
        return True
    assert run_threads(2, fn) == [True] * 2


def test_more_passes_than_were_said_are_an_error():
    def fn(world):
        model = some(perturb(tiny()), DeviceMesh(world, dp=2)["dp"])
        with pytest.raises(RuntimeError, match="after the last one that was expected"):
            with model.summing(1):
                for _ in range(2):
                    model(random_batch(13, 8, 4, 0, 0)).backward()
        return True
    assert run_threads(2, fn) == [True] * 2
