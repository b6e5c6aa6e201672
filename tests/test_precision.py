"""Mixed precision: rounding, the loss scale, masters; on ranks, the same as in one process."""
import math
from functools import partial

import numpy as np
import pytest

from minidist import BadInput, checkpoint, cost, ledger, parallel, precision, train, verify
from minidist.engine import functional as F
from minidist.engine.data import Batch, random_batch
from minidist.engine.nn import Module, Parameter
from minidist.engine.optim import SGD, AdamW, warmup_cosine
from minidist.engine.tensor import Tensor, graph_bytes
from minidist.mesh import DeviceMesh
from minidist.precision import LossScale, moved, to_bfloat16
from minidist.ranks.comm import run_threads, solo
from minidist.step import train_step
from tests.mpi import mpi
from tests.models import tiny

AXES = "dp", "pp", "cp", "tp"
SGD_ = partial(SGD, lr=0.5, momentum=0.9)
ADAMW = partial(AdamW, lr=0.01, eps=1e-5)


# ------------------------------------------------------------------ rounding

# Upper half, lower half -> upper half: below, at and above the middle; even and odd; the ends.
ROUNDED = [(0x3F80, 0x0000, 0x3F80), (0x3F80, 0x7FFF, 0x3F80), (0x3F80, 0x8000, 0x3F80),
           (0x3F80, 0x8001, 0x3F81), (0x3F81, 0x7FFF, 0x3F81), (0x3F81, 0x8000, 0x3F82),
           (0xBF81, 0x8000, 0xBF82), (0x3FFF, 0x8000, 0x4000), (0x0000, 0x0001, 0x0000),
           (0x0000, 0x8000, 0x0000), (0x0000, 0x8001, 0x0001), (0x0001, 0x8000, 0x0002),
           (0x007F, 0x8000, 0x0080), (0x8000, 0x0000, 0x8000), (0x7F7F, 0x7FFF, 0x7F7F),
           (0x7F7F, 0x8000, 0x7F80), (0xFF7F, 0xFFFF, 0xFF80), (0x7F80, 0x0000, 0x7F80),
           (0xFF80, 0x0000, 0xFF80)]


def test_bfloat16_by_a_table():
    upper, lower, expected = np.array(ROUNDED, np.uint32).T
    y = to_bfloat16((upper << 16 | lower).view(np.float32))
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y.view(np.uint32), expected << 16)
    for bits in (0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF):
        nan = to_bfloat16(np.array(bits, np.uint32).view(np.float32))
        assert np.isnan(nan) and not nan.view(np.uint32) & 0xFFFF


def test_bfloat16_is_that_of_pytorch():
    torch = pytest.importorskip("torch")
    for lower in (0, 1, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF):
        x = (np.arange(1 << 16, dtype=np.uint32) << 16 | np.uint32(lower)).view(np.float32)
        theirs = torch.from_numpy(x.copy()).to(torch.bfloat16).float().numpy()
        ours, number = to_bfloat16(x), ~np.isnan(x)
        np.testing.assert_array_equal(ours.view(np.uint32)[number], theirs.view(np.uint32)[number])
        assert np.isnan(theirs[~number]).all() and np.isnan(ours[~number]).all()


def test_any_strides_and_no_dimension():
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_array_equal(to_bfloat16(x.T[::2]), to_bfloat16(x).T[::2])
    assert to_bfloat16(np.float32(1.001)[None][0].reshape(())) == 1


@pytest.mark.parametrize("form, step", [("fp16", 2.0 ** -10), ("bf16", 2.0 ** -7)])
def test_a_float64_is_rounded_onto_the_same_grid(form, step):
    x = np.array([1 + 0.4 * step, 1 + 0.6 * step, 1 + 0.5 * step, 1 + 1.5 * step])
    y = precision.rounded(x, form)
    assert y.dtype == np.float64
    np.testing.assert_array_equal(y, [1, 1 + step, 1, 1 + 2 * step])
    assert precision.rounded(x.astype(np.float32), form).tolist() == y.tolist()


@pytest.mark.parametrize("form", precision.FORMS)
def test_a_float64_model_starts_on_the_grid(form):
    p = precision.use(plain(), form).parameters()[0].data
    assert p.dtype == np.float64 and p.any() and (p == precision.rounded(p, form)).all()


# ------------------------------------------------------------------ the loss scale

def test_the_loss_scale_step_by_step():
    """Megatron's: the hysteresis is not refilled by clean steps, only by a window of them."""
    table = [("clean", 16, 1, 2), ("clean", 16, 2, 2), ("overflow", 16, 0, 1), ("clean", 16, 1, 1),
             ("overflow", 8, 0, 0), ("overflow", 4, 0, -1), ("clean", 4, 1, -1),
             ("clean", 4, 2, -1), ("clean", 8, 0, 2), ("overflow", 8, 0, 1), ("clean", 8, 1, 1),
             ("clean", 8, 2, 1), ("clean", 16, 0, 2), ("overflow", 16, 0, 1),
             ("overflow", 8, 0, 0), ("overflow", 4, 0, -1), ("overflow", 2, 0, -2),
             ("overflow", 2, 0, -3)]
    scale = LossScale(16.0, window=3, minimum=2.0)
    for event, *expected in table:
        scale = moved(scale, event == "overflow")
        assert [scale.value, scale.clean, scale.left] == expected, event


def test_the_loss_scale_starts_as_megatron_s():
    assert LossScale() == LossScale(2.0 ** 32, window=1000, hysteresis=2, minimum=1.0)
    scale = LossScale()
    for _ in range(999):
        scale = moved(scale, False)
    assert scale.value == 2.0 ** 32 and moved(scale, False).value == 2.0 ** 33


# ------------------------------------------------------------------ one parameter, by hand

class Slope(Module):
    """A model of two numbers whose loss has a given gradient."""

    def __init__(self, gradient, dtype=np.float16):
        self.w = Parameter(np.zeros(2, dtype), "w")
        self.gradient, self.parts, self.steps = gradient, {}, []

    def localize(self, batch):
        return batch

    def forward(self, batch):
        g = np.array(self.gradient(batch.step) if callable(self.gradient) else self.gradient)
        return (self.w.cast(np.float32) * (g * batch.count)).sum()


def go(model, optimizer, steps, max_norm=None):
    for step in range(steps):
        before, t = model.w.data.copy(), optimizer.t
        batch = Batch.of(np.zeros((1, 2), int), np.zeros((1, 2), int), step)
        result = train_step(model, batch, optimizer, max_norm=max_norm)
        yield before - model.w.data, optimizer.t - t, result


@pytest.mark.parametrize("max_norm, moves", [(10, [3, 4]), (1, [0.6, 0.8]), (None, [3, 4])])
def test_D06_unscaled_before_it_is_clipped(max_norm, moves):
    model = Slope([3, 4])
    optimizer = precision.attach(SGD([model.w], lr=1.0), "fp16", LossScale(1024.0))
    (moved_by, _, result), = go(model, optimizer, 1, max_norm)
    np.testing.assert_allclose(moved_by, moves, rtol=2 ** -10)
    assert result.norm == 5 and result.scale == 1024


def test_D06_unscaled_by_the_scale_of_its_own_backward():
    model = Slope([1, 1])
    optimizer = precision.attach(SGD([model.w], lr=1.0), "fp16", LossScale(4.0, window=1))
    scales = []
    for moved_by, _, result in go(model, optimizer, 3):
        assert moved_by.tolist() == [1, 1]
        scales.append(result.scale)
    assert scales == [4, 8, 16]


def test_D29_a_skipped_step_moves_no_schedule():
    model, rates = Slope(lambda step: [np.inf if step == 1 else 1, 1]), []
    model.after_step = [lambda: rates.append("moved")]      # as experts' balance
    optimizer = AdamW([model.w], warmup_cosine(1.0, 4, 100))
    precision.attach(optimizer, "fp16", LossScale(8.0))
    for moved_by, steps, result in go(model, optimizer, 5):
        rates += [optimizer.rate] * steps
        assert result.skipped == (steps == 0) == (not moved_by.any()) == (model.w.grad is None)
    assert rates == ["moved", 0.25, "moved", 0.5, "moved", 0.75, "moved", 1.0]
    assert optimizer.t == 4


@pytest.mark.parametrize("form, half", [("fp16", 2.0 ** -11), ("bf16", 2.0 ** -8)])
def test_a_master_keeps_what_is_less_than_half_a_step(form, half):
    """At 1, seven eighths of half a step are lost each time without a master; with it, not one."""
    model = Slope([-half * 7 / 8] * 2, np.float16 if form == "fp16" else np.float32)
    model.w.data[...] = 1
    optimizer = precision.attach(SGD([model.w], lr=1.0), form)
    alone = np.ones(1, np.float32)
    values = []
    for _ in go(model, optimizer, 16):
        values.append(float(model.w.data[0]))
        alone = precision.rounded(alone + np.float32(half * 7 / 8), form).astype(np.float32)
    assert values[0] == 1 and values[-1] == 1 + 7 * 2 * half and alone == 1


def test_weight_decay_is_that_of_the_masters():
    model = Slope([0, 0])
    model.w.data[...] = 1
    model.w.decay = True
    optimizer = precision.attach(AdamW([model.w], lr=0.1, weight_decay=0.1), "fp16")
    list(go(model, optimizer, 1))
    master = optimizer.masters["w"]
    assert master.dtype == np.float32 and np.allclose(master, 0.99, rtol=1e-7)
    assert (model.w.data == np.float16(0.99)).all()


@pytest.mark.parametrize("scale, passed", [(2.0, 2), (1.0, 1)])
def test_at_the_smallest_scale_a_step_is_an_error(scale, passed):
    model = Slope([np.nan, 1])
    optimizer = precision.attach(SGD([model.w], lr=1.0), "fp16", LossScale(scale))
    assert [result.skipped for _, _, result in go(model, optimizer, passed)] == [True] * passed
    with pytest.raises(FloatingPointError, match="smallest loss scale, 1: no step was taken"):
        list(go(model, optimizer, 1))
    assert optimizer.t == 0 and not model.w.data.any()


def test_what_an_optimizer_keeps_is_taken_over_by_another():
    one, other = Slope([3, 4]), Slope([0, 0])
    here, there = (precision.attach(ADAMW([m.w]), "fp16", LossScale(8.0)) for m in (one, other))
    list(go(one, here, 2))
    there.keep(other.w, [x.copy() for x in here.kept(one.w)])
    assert len(there.state["w"]) == 2 and there.masters["w"].any()
    for a, b in zip(here.kept(one.w), there.kept(other.w), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_checkpoint_has_masters_and_scale(tmp_path):
    """Saved after S has moved; whoever loads it goes on bit for bit."""
    def start():
        model = precision.use(plain(np.float32), "fp16")
        return model, precision.attach(ADAMW(model.parameters()), "fp16", LossScale(8.0, window=3))

    (one, here), (other, there) = start(), start()
    for batch in batches(4):
        train_step(one, batch, here)
    checkpoint.save(tmp_path, one, here, step=4)
    checkpoint.load(checkpoint.find(tmp_path, solo()), other, there)
    assert there.loss_scale == here.loss_scale == LossScale(16.0, window=3, clean=1)
    for model, optimizer in (one, here), (other, there):
        train_step(model, batches(5)[4], optimizer)
    for p, q in zip(one.parameters(), other.parameters()):
        np.testing.assert_array_equal(p.data, q.data)
        for a, b in zip(here.kept(p), there.kept(q), strict=True):
            np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------ float16 operations

def random(*shape, scale=1.0):
    rng = np.random.default_rng(0)
    return (scale * rng.standard_normal(shape)).astype(np.float16)


@pytest.mark.parametrize("fn, shapes", [
    (F.linear, [(5, 300), (7, 300), (7,)]), (F.layer_norm, [(5, 90), (90,), (90,)]),
    (F.gelu, [(5, 90)]), (F.softmax, [(5, 90)]), (Tensor.__matmul__, [(2, 5, 300), (300, 7)]),
    (F.scaled_dot_product_attention, [(2, 4, 70, 8), (2, 2, 70, 8), (2, 2, 70, 8)]),
    (lambda w: F.embedding(w, np.arange(3000) % 2), [(2, 4)])])
def test_float16_operations_sum_in_float32(fn, shapes):
    found = []
    for dtype in (np.float16, np.float64):
        xs = [Tensor(random(*shape).astype(dtype), requires_grad=True) for shape in shapes]
        y = fn(*xs)
        y.backward(random(*y.shape, scale=0.1).astype(dtype))
        found.append([y.data, *(x.grad for x in xs)])
    for a, b in zip(*found):
        assert a.dtype == np.float16
        assert np.abs(a - b).max() <= 2 ** -8 * np.abs(b).max()


def test_gelu_of_large_float16():
    x = Tensor(np.array([-60000, -300, 300, 60000], np.float16), requires_grad=True)
    y = F.gelu(x)
    y.backward(np.ones(4, np.float16))
    assert y.data.tolist() == [0, 0, 300, 60000] and x.grad.tolist() == [0, 0, 1, 1]


def test_the_loss_is_float32():
    model = precision.use(tiny(np.float32, context=128), "fp16")
    batch = random_batch(13, 128, 250, seed=1, step=0, ragged=False)
    loss = model.parts["head"](Tensor(random(250, 128, 16)), batch)
    assert loss.dtype == np.float32 and 65504 < loss.item() < 1e5


def test_bf16_is_rounded_where_modules_meet():
    model, seen = precision.use(tiny(np.float32), "bf16"), []
    for part in [*model.blocks, *(block.mlp.fc2 for block in model.blocks)]:
        part.wrap(lambda forward, x, *args: look(forward(look(x), *args)))

    def look(x):
        seen.append(x.data)
        return Tensor(x.data, (x,), lambda g: seen.append(g) or (g,))

    model(random_batch(13, 8, 3, seed=1, step=2)).backward()
    inner = [x for x in seen if x.shape[-1] == model.config.width]
    assert len(inner) >= 4 * 3 + 4
    for x in [*inner, *(p.data for p in model.parameters())]:
        assert x.dtype == np.float32 and (x == to_bfloat16(x)).all()


# ------------------------------------------------------------------ bytes

def test_two_and_two_and_twelve_bytes():
    model = precision.use(tiny(np.float32), "fp16")
    optimizer = precision.attach(ADAMW(model.parameters()), "fp16", LossScale(8.0))
    train_step(model, random_batch(13, 8, 3, seed=1, step=2), optimizer)
    n = sum(p.size for p in model.parameters())
    assert tuple(ledger.held(model, optimizer)[:3]) == (2 * n, 2 * n, 12 * n)
    assert cost.state_bytes("fp16") == (2, 2, 12)


def test_bf16_gradients_are_float32():
    model = precision.use(tiny(np.float32), "bf16")
    optimizer = precision.attach(ADAMW(model.parameters()), "bf16")
    train_step(model, random_batch(13, 8, 3, seed=1, step=2), optimizer)
    n = sum(p.size for p in model.parameters())
    assert ledger.held(model, optimizer)[1:3] == (4 * n, 12 * n)
    assert cost.state_bytes("bf16") == (2, 4, 12) and cost.state_bytes(None) == (4, 4, 8)


@pytest.mark.parametrize("sizes", [dict(), dict(dropout=0.2), dict(kv_heads=4, tied=False)])
def test_activations_equal_the_formula(sizes):
    model = precision.use(tiny(np.float32, **sizes), "fp16")
    batch = random_batch(13, 8, 3, seed=1, step=2)
    held = graph_bytes(model(batch), exclude=ledger.known(model, batch))
    assert held == cost.gpt_activations(cost.Sizes.of(model.config, B=3, w=2, loss=4), batch.count)


# ------------------------------------------------------------------ on ranks

def layout(options):
    """Split options into the sizes of axes and the rest."""
    sizes = {axis: options.get(axis, 1) for axis in AXES}
    rest = {k: v for k, v in options.items() if k not in AXES}
    return sizes, rest, math.prod(sizes.values())


def plain(dtype=np.float64, **sizes):
    return verify.perturb(tiny(dtype, **{**dict(layers=3, heads=6, kv_heads=6, width=24, vocab=14,
                                                dropout=0.2), **sizes}))


def batches(steps):
    return [random_batch(14, 8, 6, seed=1, step=step) for step in range(steps)]


LAYOUTS = [dict(dp=2), dict(dp=3), dict(dp=3, zero=1), dict(dp=4, zero=2), dict(dp=3, zero=3),
           dict(tp=2), dict(tp=2, sequence="again"), dict(cp=2), dict(cp=2, method="ulysses"),
           dict(pp=2), dict(pp=2, dp=2, zero=1), dict(tp=2, recompute="blocks"),
           dict(dp=2, tp=2, sequence="again", zero=3)]
FORMS = [("fp16", options) for options in LAYOUTS] + [
    ("bf16", options) for options in (dict(dp=3, zero=3), dict(tp=2, sequence="keep"), dict(pp=2))]
by_form = pytest.mark.parametrize("form, options", FORMS, ids=str)


def compared(comm, options, form, make, scale):
    """Train three steps with a twin; everything in float64 but the rounding.  -> Verdict, S"""
    sizes, options, _ = layout(options)
    mesh = DeviceMesh(comm, **sizes)
    model = parallel.spread(plain(), mesh, precision=form, **options)
    ours = parallel.equip(make(model.parameters()), model)
    ours.loss_scale = scale
    twin = verify.Twin(lambda: precision.use(plain(), form), lambda params: with_scale(
        precision.attach(make(params), form), scale), mesh)
    for batch in batches(3):
        step = train_step(model, batch, ours, mesh, num_microbatches=2, max_norm=0.5)
        twin.check(step, model, ours, batch, max_norm=0.5)
    return twin.verdict, ours.loss_scale


def test_a_twin_that_repeats_its_step_repeats_its_scale():
    """A window of 1 doubles S in each step, and with it the gradients of the repetition."""
    def trained(change):
        model, scale = precision.use(plain(), "fp16"), LossScale(8.0, window=1)
        ours = with_scale(precision.attach(ADAMW(model.parameters()), "fp16"), scale)
        twin = verify.Twin(lambda: precision.use(plain(), "fp16"), lambda params: with_scale(
            precision.attach(ADAMW(params), "fp16"), scale), DeviceMesh(solo()))
        step = train_step(model, batches(1)[0], ours)
        model.parameters()[0].grad *= change
        return twin.check(step, model, ours, batches(1)[0]), twin.optimizer.loss_scale

    for change, equal in (1, True), (1 + 1e-6, False):
        verdict, scale = trained(change)
        assert verdict.equal == equal and scale.value == 16


def with_scale(optimizer, scale):
    optimizer.loss_scale = scale
    return optimizer


@by_form
def test_a_layout_trains_as_one_process_does(form, options):
    """Masters, rounded parameters, moments, scaled gradients, norm and S, over three steps.

    SGD where pieces are written; elsewhere its step has no part in the layout."""
    scale = LossScale(8.0, window=2) if form == "fp16" else None
    for make in (SGD_, ADAMW) if options.get("zero") == 3 else (ADAMW,):
        verdict, scale_after = run_threads(layout(options)[2], compared, options, form, make,
                                           scale)[0]
        assert verdict.equal and verdict.steps == 3, verdict.line()
        assert form != "fp16" or scale_after.value == 16


def trained(comm, options, form, steps=3, planted=None):
    """Train in real 16 bits; planted(step): put an infinity into a gradient of the last rank."""
    sizes, options, _ = layout(options)
    mesh = DeviceMesh(comm, **sizes)
    model = parallel.spread(plain(np.float32), mesh, precision=form, **options)
    optimizer = parallel.equip(ADAMW(model.parameters(), lr=warmup_cosine(0.01, 4, 20)), model)
    if form == "fp16":
        optimizer.loss_scale = LossScale(8.0)
    now = []
    if planted is not None and comm.rank == comm.size - 1:
        def plant(p):
            if now[-1] == planted:
                p.grad.reshape(-1)[-1] = np.inf
        model.parameters()[-1].hooks.insert(0, plant)
    states, results = [], []
    with np.errstate(over="ignore", invalid="ignore"):
        for batch in batches(steps):
            now.append(batch.step)
            results.append(train_step(model, batch, optimizer, mesh, max_norm=0.5))
            held = {p.name: [p.data, *optimizer.kept(p)] for p in model.parameters()}
            states.append({name: [x.copy() for x in arrays] for name, arrays in held.items()})
    return states, results, optimizer.t, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_an_infinity_on_the_last_rank_makes_all_skip(options):
    """Nothing moves; and as S does not either at a first overflow, the run goes on as if that
    batch had never been."""
    ranks = layout(options)[2]
    found = run_threads(ranks, trained, options, "fp16", 3, 1)
    for states, results, t, _ in found:
        assert [r.skipped for r in results] == [False, True, False] and t == 2
        assert results[2].scale == 8
        for name, arrays in states[0].items():
            for a, b in zip(arrays, states[1][name], strict=True):
                np.testing.assert_array_equal(a, b)
        moved_on = [name for name in states[2] if (states[2][name][0] != states[1][name][0]).any()]
        assert len(moved_on) > len(states[2]) / 2


ERROR = 2.0 ** -6            # of a gradient, relative to its largest: roundings of 2^-11 on the way


@by_form
def test_real_16_bits_are_near_one_process(form, options):
    """Sums over ranks round in another order: bounded, not equal."""
    bound = ERROR * (1 if form == "fp16" else 4)
    reference = run_threads(1, gathered, {}, form)[0]
    found = run_threads(layout(options)[2], gathered, options, form)
    for name, whole in reference.items():
        largest = np.abs(whole).max()
        for ours in (rank[name] for rank in found if name in rank):
            assert np.abs(ours - whole).max() <= bound * largest + 1e-3, name


def gathered(comm, options, form):
    sizes, options, _ = layout(options)
    mesh = DeviceMesh(comm, **sizes)
    model = parallel.spread(plain(np.float32), mesh, precision=form, **options)
    optimizer = parallel.equip(SGD(model.parameters(), lr=0.1), model)
    if form == "fp16":
        optimizer.loss_scale = LossScale(1.0)
    train_step(model, batches(1)[0], optimizer, mesh)
    found = verify.gathered(model.parameters(), optimizer)
    return {what: np.float64(x) for what, x in found.items() if what.endswith("gradient")}


def test_ranks_send_half_the_bytes():
    def sent(comm, form):
        mesh = DeviceMesh(comm, dp=2)
        model = parallel.spread(plain(np.float32), mesh, precision=form)
        optimizer = parallel.equip(SGD(model.parameters(), lr=0.1), model)
        optimizer.loss_scale = form and LossScale(1.0)
        with comm.counting() as counted:
            train_step(model, batches(1)[0], optimizer, mesh)
        return counted.bytes
    whole, half = (run_threads(2, sent, form)[0] for form in (None, "fp16"))
    parameters = sum(p.size for p in plain().parameters())
    flags = len(plain().parameters())
    assert whole - half == 2 * (parameters + flags) - 4     # less the 4 bytes: has one overflowed?


@mpi(2)
def test_over_mpi(comm):
    verdict, _ = compared(comm, dict(dp=2, zero=2), "fp16", ADAMW, LossScale(8.0))
    assert verdict.equal, verdict.line()
    _, results, t, _ = trained(comm, dict(tp=2), "fp16", planted=1)
    assert [r.skipped for r in results] == [False, True, False] and t == 2


# ------------------------------------------------------------------ the command

def test_precision_says_the_dtype():
    with pytest.raises(BadInput, match="leave out --dtype"):
        train.options(["--precision", "fp16", "--dtype", "float64"])
    assert train.options(["--precision", "bf16", "--verify"]).dtype == "float64"


def test_a_run_in_16_bits_goes_on(tmp_path, capsys):
    args = ["--preset", "lesson", "--layers", "1", "--sample", "0", "--batch", "2", "--no-figure",
            "--precision", "fp16", "--steps", "4", "--save-every", "2", "--out", str(tmp_path)]
    train.command(train.options(args))
    train.command(train.options(["--resume", str(tmp_path / "step_2")]))
    digests = [line for line in capsys.readouterr().out.splitlines() if "sha256" in line]
    assert len(digests) == 2 and digests[0] == digests[1]
