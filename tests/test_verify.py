"""The proof itself: it passes what is right, and catches what is wrong."""
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minidist import buckets, dp, step, tp, verify
from minidist.engine.data import random_batch
from minidist.engine.optim import SGD, AdamW
from minidist.mesh import DeviceMesh
from minidist.ranks.comm import run_threads
from minidist.verify import compare, difference
from tests.layout import check_layout, layout
from tests.models import TINY, perturb, tiny

def plain(model, mesh):
    return dp.parallelize(model, mesh["dp"])


def ddp(model, mesh):
    return dp.DistributedDataParallel(model, mesh["dp"], bucket_bytes=4000)


# -------------------------------------------------------------------------- how it compares

def test_relative_difference_of_a_tensor():
    reference = np.array([1.0, -4.0])
    assert difference(np.array([1.5, -4.0]), reference, 4.0) == 0.125
    assert difference(reference, reference, 4.0) == 0.0
    assert difference(np.zeros(0), np.zeros(0), 0.0) == 0.0


@pytest.mark.parametrize("ours, reference", [
    (None, np.ones(2)), (np.ones(2), None), (np.array([1.0, np.nan]), np.ones(2)),
    (np.array([np.inf, 1.0]), np.ones(2)), (np.ones(2), np.array([np.nan, 1.0]))])
def test_missing_or_not_finite_is_infinitely_far(ours, reference):
    assert difference(ours, reference, 1.0) == np.inf


def test_no_gradient_on_either_side_is_equal():
    assert difference(None, None, 1.0) == 0.0


def test_a_reference_that_is_zero_up_to_rounding_takes_the_largest_gradient_as_its_scale():
    reference = {"w gradient": np.array([8.0]), "key.bias gradient": np.array([1e-16]),
                 "small gradient": np.array([1e-9])}
    ours = {"w gradient": np.array([8.0]), "key.bias gradient": np.array([-3e-16]),
            "small gradient": np.array([2e-9])}
    found = compare(ours, reference)
    assert found["key.bias gradient"] == pytest.approx(4e-16 / 8)
    assert found["small gradient"] == pytest.approx(1.0)


def test_a_name_that_one_process_does_not_have_is_a_difference():
    x = {"w parameter": np.ones(1)}
    found = compare({**x, "v parameter": np.ones(1)}, x)
    assert found["v parameter, which one process does not have"] == np.inf
    assert compare({}, x)["w parameter"] == np.inf


def test_replicas_that_differ_only_in_a_gradient_are_found():
    def fn(world):
        mesh, model = DeviceMesh(world, dp=3), tiny()
        model.parameters()[1].grad = np.full(model.parameters()[1].shape, 1.0 + world.rank)
        return verify.unequal_replicas(model.parameters(), mesh)
    assert run_threads(3, fn) == [{"embed.wpe.weight": 0.0}] * 3


def test_key_biases_have_no_gradient_and_do_not_matter():
    """Zero-initialised biases: the key's third of qkv.bias only ever holds rounding noise."""
    check_layout(plain, dp=2, prepare=lambda model: model, kv_heads=None)


# ---------------------------------------------------------------------------- what it says

def test_the_line_of_an_equivalent_run():
    verdict = layout(ddp, "SGD", {"dp": 2})
    assert verdict.equal and verdict.steps == 3 and 0 < verdict.worst < 1e-13
    assert verdict.line() == (f"EQUIVALENT  max relative difference {verdict.worst:.1e} "
                              "(bound 1e-11)")


def test_the_line_of_a_run_that_diverges():
    verdict = verify.Verdict(steps=3, worst=0.041, where="blocks.1.attn.qkv.weight gradient",
                             equal=False)
    assert verdict.line() == "DIVERGED at step 2: blocks.1.attn.qkv.weight gradient, 4.1e-02"


def test_the_first_step_that_differs_is_named(monkeypatch):
    """A gradient that is wrong from the second step on, in one parameter, by one part in 10^9."""
    finalize = step.finalize

    def wrong(params, mesh, count):
        finalize(params, mesh, count)
        if mesh.world.size > 1:
            mesh.steps = getattr(mesh, "steps", 0) + 1
            bad = next(p for p in params if p.name == "blocks.1.attn.qkv.weight")
            bad.grad[3, 2] *= 1 + 1e-9 * (mesh.steps > 1)

    monkeypatch.setattr(step, "finalize", wrong)
    verdict = layout(plain, "SGD", {"dp": 2}, max_norm=None)
    assert not verdict.equal and verdict.steps == 2 and 1e-11 < verdict.worst < 1e-9
    assert verdict.line().startswith("DIVERGED at step 1: blocks.1.attn.qkv.weight ")


def test_after_a_difference_the_verdict_stays():
    def fn(world):
        mesh, model = DeviceMesh(world, dp=2), tiny(seed=1)
        twin = verify.Twin(tiny, lambda ps: SGD(ps, 0.1), mesh)
        optimizer, lines = SGD(model.parameters(), 0.1), []
        for _ in range(2):
            result = step.train_step(model, batch(), optimizer, mesh)
            lines.append(twin.check(result, model, optimizer, batch()).line())
        return lines
    first, second = run_threads(2, fn)[0]
    assert first == second and first.startswith("DIVERGED at step 0: ")


# ------------------------------------------------------------------------- what it catches

def caught(strategy, optimizer="SGD", prepare=perturb, **options):
    verdict = layout(strategy, optimizer, {"dp": 3}, prepare=prepare, **options)
    assert not verdict.equal and verdict.worst > 1e-4
    assert verdict.line().startswith("DIVERGED at step 0: ")
    return verdict


def test_no_all_reduce(monkeypatch):
    monkeypatch.setattr(buckets, "all_reduce", lambda x, comm, **options: x)
    caught(ddp)


def test_a_sum_that_was_forgotten():
    def forgetful(model, mesh):
        model = plain(model, mesh)
        model.blocks[1].norm2.bias.partial.clear()
        return model
    assert "blocks.1.norm2.bias" in caught(forgetful).where


def test_sum_instead_of_mean(monkeypatch):
    """Each rank divides by its own count: gradients three times too large.  Even for AdamW"""
    finalize = step.finalize
    monkeypatch.setattr(step, "finalize", lambda params, mesh, count: finalize(
        params, mesh, count / mesh.sizes["dp"]))
    for optimizer in ("SGD", "AdamW"):
        assert caught(ddp, optimizer).worst == pytest.approx(2.0)


def test_mean_of_means():
    """Each rank averages over its own tokens, then the ranks' means are averaged."""
    def mean_of_means(model, mesh):
        model = plain(model, mesh)
        share = model.localizers[-1]

        def weigh(batch):
            mine = share(batch)
            model.weight = batch.count / mine.count / mesh.sizes["dp"]
            return mine

        model.localizers[-1] = weigh
        model.wrap(lambda forward, batch: forward(batch) * model.weight)
        return model

    caught(mean_of_means)


def test_no_initial_broadcast(monkeypatch):
    monkeypatch.setattr(dp, "start_equal", lambda model, comm: None)

    def fn(world):
        mesh = DeviceMesh(world, dp=2)
        return verify.train(lambda: tiny(seed=world.rank), lambda ps: SGD(ps, 0.1), plain, mesh,
                            [batch()])
    verdict = run_threads(2, fn)[0]
    assert not verdict.equal and verdict.worst > 0.1


def batch():
    return random_batch(TINY["vocab"], TINY["context"], 4, 0, 0)


def test_replicas_must_agree_to_the_last_bit():
    """One rank's parameter is off by one in the last place: far below the bound, yet caught."""
    def nudged(model, mesh):
        model = plain(model, mesh)
        p = model.blocks[0].norm1.bias
        if mesh.world.rank == 2:
            p.data[1] = np.nextafter(p.data[1], 1)
        return model
    verdict = layout(nudged, "SGD", {"dp": 3})
    assert not verdict.equal and 0 < verdict.worst < 1e-15
    assert verdict.line().startswith("DIVERGED at step 0: blocks.0.norm1.bias differs between "
                                     "ranks that should agree, ")


def test_a_wrong_seed_of_dropout():
    """A mask keyed by the local row instead of the global one."""
    def local_rows(model, mesh):
        model = plain(model, mesh)
        model.localizers.append(lambda b: replace(b, rows=np.arange(len(b.rows))))
        return model
    caught(local_rows)


def test_the_usual_eps_of_adamw_steps_from_noise():
    """Why eps is 1e-5: with a tiny one, the same right run differs by 100 times more."""
    def run(world, eps):
        return verify.train(lambda: tiny(kv_heads=None), lambda ps: AdamW(ps, 0.01, eps=eps), plain,
                            DeviceMesh(world, dp=2), [batch()] * 3)
    usual, ours = (run_threads(2, run, eps)[0] for eps in (1e-12, verify.ADAMW_EPS))
    assert ours.worst < 1e-12 and usual.worst > 100 * ours.worst


# ------------------------------------------------------------------- from the same state

def long_run(seed, steps=60):
    """Train for many steps of AdamW, with the eps that everybody has."""
    def fn(world):
        batches = [random_batch(TINY["vocab"], TINY["context"], 4, seed, t) for t in range(steps)]
        return verify.train(lambda: tiny(seed=seed), lambda ps: AdamW(ps, 0.01), ddp,
                            DeviceMesh(world, dp=2), batches)
    return run_threads(2, fn)[0]


@pytest.mark.parametrize("seed", [0, 8])
def test_many_steps_of_any_optimizer_hold_the_bound(seed):
    """Rounding that training amplifies is no difference: each step starts from the ranks' state."""
    verdict = long_run(seed)
    assert verdict.equal and verdict.steps == 60, verdict.line()


def test_without_the_same_state_they_would_not(monkeypatch):
    """The old way, for the record: the twin goes on from its own numbers."""
    monkeypatch.setattr(verify.Twin, "take_over", lambda self, *numbers: None)
    monkeypatch.setattr(verify.Twin, "beyond_rounding", lambda self, found, *rest: found)
    assert not long_run(0).equal


def cancelling(model):
    """Let the gradient of one parameter pass through 1e5 on its way: an ulp there is 1.5e-11."""
    w = perturb(model).blocks[1].norm1.weight

    def around(forward, batch):
        before = (w * 1e5).sum()
        return forward(batch) + before - (w * 1e5).sum()

    model.wrap(around)
    return model


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_that_cancel_are_no_difference(optimizer, ranks, monkeypatch):
    verdict = layout(plain, optimizer, {"dp": ranks}, prepare=cancelling)
    assert verdict.equal and verdict.steps == 3, verdict.line()
    monkeypatch.setattr(verify.Twin, "beyond_rounding", lambda self, found, *rest: found)
    verdict = layout(plain, optimizer, {"dp": ranks}, prepare=cancelling)
    assert not verdict.equal and "blocks.1.norm1.weight" in verdict.where and verdict.worst < 1e-6


def test_a_mistake_larger_than_what_cancels_is_found():
    """A thousandth of the gradient that cancels; a billionth of every other one."""
    for name, factor in (("blocks.1.norm1.weight", 1e-3), ("blocks.1.norm1.bias", 1e-9)):
        def wrong(model, mesh, name=name, factor=factor):
            model = plain(model, mesh)
            [p] = [p for p in model.parameters() if p.name == name]
            p.register_post_accumulate_grad_hook(lambda p: np.multiply(p.grad, 1 + factor, p.grad))
            return model
        verdict = layout(wrong, "SGD", {"dp": 2}, prepare=cancelling, max_norm=None)
        assert not verdict.equal and verdict.where.startswith(name), verdict.line()


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("start", [0, 1, 7])
def test_a_gradient_one_part_in_a_billion_too_large_on_one_rank(optimizer, start):
    def slightly(model, mesh):
        model = plain(model, mesh)
        calls = []

        def around(forward, batch):
            calls.append(1)
            y = forward(batch)
            late = mesh.world.rank == 1 and len(calls) > start
            return y * (1 + 1e-9) if late else y

        model.wrap(around)
        return model

    verdict = layout(slightly, optimizer, {"dp": 2}, steps=start + 2, max_norm=None)
    assert not verdict.equal and start < verdict.steps <= start + 2, verdict.line()


def test_a_layout_of_all_axes_that_stand():
    def strategy(model, mesh):
        return ddp(tp.parallelize(model, mesh["tp"]), mesh)
    assert verify.layout(strategy, dp=2, tp=2).equal


def recipes():
    """The text that says how to check one's own ZeRO, as the docstring and the README have it."""
    shown = re.search(r"    from minidist import verify, zero\n.*?line\(\)\)\n", verify.__doc__,
                      re.S)
    readme = (Path(verify.__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(from minidist import verify, zero\n.*?)```", readme, re.S)
    return [textwrap.dedent(shown[0]), *blocks]


def test_the_recipe_for_a_zero_of_one_s_own_runs(capsys):
    """Right as it stands, in under ten lines; wrong without its optimizer side."""
    first, second = recipes()
    assert first == second and len(list(filter(None, first.splitlines()))) < 10
    exec(first, {})
    assert capsys.readouterr().out.startswith("EQUIVALENT")
    right, wrong = "return zero.attach(optimizer, model)", \
        "optimizer.target = zero.attach(optimizer, model).target; optimizer.after_step.clear(); " \
        "return optimizer"
    assert right in first
    exec(first.replace(right, wrong), {})
    assert capsys.readouterr().out.startswith("DIVERGED at step 0")
