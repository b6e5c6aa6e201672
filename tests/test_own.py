"""A strategy of one's own: ZeRO-1, written outside the library, checked by verify.layout.

The optimizer's state is cut flat over dp. Each rank writes its piece of every parameter, then all
pieces are gathered. Both ways use the library's seams only: placement.Flat, Parameter.sliced,
Optimizer.target and after_step, buckets.Reducer.
"""
import numpy as np
import pytest

from minidist import buckets, cost, dp, verify
from minidist.collectives import chosen
from minidist.engine.data import random_batch
from minidist.engine.optim import SGD
from minidist.mesh import DeviceMesh, adopt
from minidist.placement import Flat
from minidist.ranks.comm import run_threads
from minidist.step import train_step
from tests.layout import OPTIMIZERS
from tests.models import perturb, tiny


def sharded(model, mesh):
    """Finish every gradient as my piece of it: finalize reduce_scatters what is sliced."""
    dp.parallelize(model, mesh["dp"])
    for p in model.parameters():
        p.sliced["dp"] = Flat(p.shape, mesh["dp"])
    return model


def bucketed(model, mesh):
    """The same pieces, from buckets that are reduce_scattered during backward."""
    comm = mesh["dp"]
    adopt(model, comm)
    dp.share_rows(model, comm)
    params = [p for p in reversed(model.parameters()) if p.requires_grad]
    for p in params:
        p.sliced["dp"] = Flat(p.shape, comm)
    reducer = buckets.Reducer(model, comm, params, 4000, 2000, ranks=comm.size)
    model.reducer, model.summing = reducer, reducer.summing
    return model


def zero1(optimizer, model, mesh, forget=lambda p, t: False):
    """Let the optimizer write my piece of every parameter; then gather all pieces."""
    def target(p):
        mine = p.sliced["dp"].mine
        grad = None if p.grad is None else p.grad[:mine.stop - mine.start]
        return p.data.reshape(-1)[mine], grad

    def share():
        for p in model.parameters():
            if not forget(p, optimizer.t):
                flat = p.sliced["dp"]
                p.data[...] = flat.join(flat.cut(p.data))

    optimizer.target = target
    optimizer.after_step.append(share)
    return optimizer


def stale(optimizer, model, mesh):
    """One parameter is not gathered from the second step on."""
    return zero1(optimizer, model, mesh,
                 lambda p, t: p.name == "blocks.1.attn.qkv.weight" and t >= 2)


@pytest.mark.parametrize("strategy", [sharded, bucketed])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (2, 2), (3, 1), (4, 3)])
def test_zero1_is_equivalent(strategy, optimizer, ranks, microbatches):
    verdict = verify.layout(strategy, zero1, OPTIMIZERS[optimizer], dp=ranks,
                            num_microbatches=microbatches)
    assert verdict.equal and verdict.steps == 3, verdict.line()


@pytest.mark.parametrize("strategy", [sharded, bucketed])
def test_a_stale_gather_is_named(strategy):
    verdict = verify.layout(strategy, stale, dp=3)
    assert not verdict.equal
    assert verdict.line().startswith("DIVERGED at step 1: blocks.1.attn.qkv.weight ")


def test_an_optimizer_state_that_is_wrong_is_named():
    """Momentum that is lost in one piece: parameters and gradients of that step are right."""
    def forgetful(optimizer, model, mesh):
        def lose():
            if mesh.coords["dp"] == 1:
                optimizer.state["head.norm.weight"][0][...] = 0
        optimizer.after_step.append(lose)
        return zero1(optimizer, model, mesh)

    verdict = verify.layout(sharded, forgetful, OPTIMIZERS["SGD"], dp=2)
    assert verdict.line().startswith(
        "DIVERGED at step 0: head.norm.weight optimizer state 0, "), verdict.line()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pieces_are_held_once_and_cost_two_times_the_model(ranks):
    """State is 1/p of the model, padded; a step sends a reduce_scatter and an all_gather of it."""
    def fn(world):
        mesh = DeviceMesh(world, dp=ranks)
        model = bucketed(perturb(tiny()), mesh)
        optimizer = zero1(SGD(model.parameters(), 0.1, momentum=0.9), model, mesh)
        with world.counting() as counted:
            train_step(model, random_batch(13, 8, 5, 0, 0), optimizer)
        state = sum(x.size for arrays in optimizer.state.values() for x in arrays)
        rows = [bucket.rows.shape[1] for bucket in model.reducer.buckets]
        pieces = [p.sliced["dp"].size for p in model.parameters()]
        return counted.by_label, state, rows, pieces, sum(p.size for p in model.parameters())

    found = run_threads(ranks, fn)
    assert sum(state for _, state, *_ in found) == found[0][4]
    for rank, (sent, _, rows, pieces, _) in enumerate(found):
        for label, sizes in (("reduce_scatter", rows), ("all_gather", pieces)):
            price = [getattr(cost, label)(chosen(label, n * ranks * 8, ranks), [n] * ranks, 8, rank)
                     for n in sizes]
            assert sent[label].bytes == sum(one.bytes for one in price)


def test_a_piece_that_does_not_fit_its_gradient_is_refused():
    def fn(world):
        mesh = DeviceMesh(world, dp=2)
        model = bucketed(tiny(), mesh)
        optimizer = SGD(model.parameters(), 0.1)
        with pytest.raises(ValueError, match="meet in one update"):
            train_step(model, random_batch(13, 8, 5, 0, 0), optimizer)
        return True
    assert run_threads(2, fn) == [True] * 2


def test_all_ranks_get_the_same_verdict():
    def fn(world):
        mesh = DeviceMesh(world, dp=3)
        verdict = verify.train(lambda: perturb(tiny()), OPTIMIZERS["SGD"], sharded, mesh,
                               [random_batch(13, 8, 5, 0, t) for t in range(3)], equip=stale)
        return verdict.equal, verdict.steps, float(np.float64(verdict.worst))
    assert len(set(run_threads(3, fn))) == 1
