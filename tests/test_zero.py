"""ZeRO: the same training as one process, whatever is held in pieces; what is sent and held."""
import numpy as np
import pytest

from minidist import BadInput, buckets, cost, dp, ledger, parallel, pp, sp, tp, verify, zero
from minidist.dp import DistributedDataParallel
from minidist.engine.data import random_batch
from minidist.engine.gpt import GPT
from minidist.engine.nn import Module, Parameter
from minidist.engine.optim import SGD
from minidist.engine.tensor import sum as total
from minidist.engine.tensor import tanh
from minidist.mesh import DeviceMesh
from minidist.placement import everything
from minidist.ranks.comm import run_threads
from minidist.step import train_step
from tests.layout import OPTIMIZERS
from tests.models import perturb, tiny

STAGES = [1, 2, 3]
stages = pytest.mark.parametrize("stage", STAGES)
SMALL = dict(bucket_bytes=100, first_bucket_bytes=1)


class Piece(Module):
    """n numbers, looked up by the tokens."""

    def __init__(self, name, n):
        self.w = Parameter(np.linspace(-1, 1.5, n) if n > 1 else np.array([0.3]), name)

    def forward(self, x, batch):
        y = tanh(self.w[batch.tokens % self.w.size])
        return y if x is None else x + x * y


class End(Module):
    """The loss: a part without parameters."""

    def forward(self, x, batch):
        return total((x - batch.targets / 13) * (x - 1.0))


class Toy(Module):
    """Parameters of 5, 1 and 7 numbers."""
    localize, forward = GPT.localize, GPT.forward

    def __init__(self):
        self.localizers = []
        self.parts = {f"p{n}": Piece(f"p{n}", n) for n in (5, 1, 7)} | {"end": End()}


def batches(steps=5, rows=6):
    return [random_batch(13, 8, rows, 7, t, ragged=False) for t in range(steps)]


def sharded(stage, size="large"):
    options = SMALL if size == "tiny" and stage < 3 else {}
    return lambda model, mesh: zero.parallelize(model, mesh["dp"], stage, **options)


def attach(optimizer, model, mesh):
    return zero.attach(optimizer, model)


def proven(stage, size="large", more=None, optimizers=OPTIMIZERS, **options):
    """Fail unless the small GPT trains as in one process."""
    def strategy(model, mesh):
        return sharded(stage, size)(more(model, mesh) if more else model, mesh)

    for name in optimizers:
        verdict = verify.layout(strategy, attach, OPTIMIZERS[name], **options)
        assert verdict.equal and verdict.steps == options.get("steps", 3), verdict.line()


# ------------------------------------------------------------------- the same training

@stages
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", ["tiny", "large"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_sizes_5_1_7(stage, ranks, size, microbatches):
    def fn(world, name):
        with DeviceMesh(world, dp=ranks) as mesh:
            return verify.train(Toy, OPTIMIZERS[name], sharded(stage, size), mesh, batches(),
                                equip=attach, num_microbatches=microbatches, max_norm=0.5)

    for name in OPTIMIZERS:
        verdict = run_threads(ranks, fn, name)[0]
        assert verdict.equal and verdict.steps == 5, f"{name}: {verdict.line()}"


@stages
@pytest.mark.parametrize("ranks, microbatches, size", [(1, 1, "large"), (2, 3, "large"),
                                                       (3, 1, "tiny"), (4, 3, "tiny")])
def test_the_gpt(stage, ranks, microbatches, size):
    proven(stage, size, dp=ranks, num_microbatches=microbatches, tied=ranks != 3)


@stages
def test_synchronous_sends_and_more_ranks_than_rows(stage):
    proven(stage, "tiny", dp=3, rows=2, num_microbatches=2, sync=True, optimizers=["AdamW"])


@stages
def test_many_ranks(stage):
    proven(stage, dp=16, steps=1, optimizers=["SGD"])


def sequence(model, mesh):
    tp.parallelize(model, mesh["tp"], sp.enter, sp.leave)
    return sp.parallelize(model, mesh["tp"])


@stages
@pytest.mark.parametrize("more", [lambda model, mesh: tp.parallelize(model, mesh["tp"]), sequence])
@pytest.mark.parametrize("sizes", [dict(dp=2, tp=2), dict(dp=2, tp=4, kv_heads=2)])
def test_with_tensor_and_sequence_parallelism(stage, more, sizes):
    """tp=4 has fewer key/value heads than ranks."""
    proven(stage, "tiny", more, ["AdamW"], num_microbatches=2, **sizes)


def trained(world, wrap, steps=5):
    """Train without clipping, whose norm is summed in another order.  -> all parameters"""
    mesh = DeviceMesh(world, dp=world.size)
    model = wrap(perturb(tiny()), mesh)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    if hasattr(model, "gather_all"):
        zero.attach(optimizer, model)
    for batch in batches(steps):
        train_step(model, batch, optimizer)
    return everything(model.parameters(), mesh)


@stages
def test_two_ranks_are_bitwise_equal_to_data_parallelism(stage):
    ddp = run_threads(2, trained, lambda model, mesh: DistributedDataParallel(model, mesh["dp"]))
    for rank, found in enumerate(run_threads(2, trained, sharded(stage))):
        for name, x in ddp[rank].items():
            assert np.array_equal(found[name], x), name


# ------------------------------------------------------------------- unusual parameters

def freeze(*names):
    def prepare(model):
        for p in perturb(model).parameters():
            p.requires_grad = not p.name.startswith(names)
        return model
    return prepare


@stages
@pytest.mark.parametrize("names", [("blocks.1", "embed.wpe"), ("embed", "blocks.0"),
                                   ("head.norm", "blocks.2.mlp")])
def test_frozen_parameters(stage, names):
    for tied in (True, False):
        proven(stage, "tiny", dp=3, prepare=freeze(*names), tied=tied, optimizers=["SGD"])


class Sometimes(Piece):
    """Uses its second parameter where the batch holds row 0 (on one rank), its third nowhere."""

    def __init__(self, name, n):
        super().__init__(name, n)
        self.first, self.never = Parameter(np.ones(3), name + "first"), Parameter(np.ones(4), "no")

    def forward(self, x, batch):
        y = super().forward(x, batch)
        return y * total(self.first) if 0 in batch.rows else y * 3.0


class SometimesToy(Toy):
    def __init__(self):
        super().__init__()
        self.parts["p1"] = Sometimes("p1", 1)


@stages
@pytest.mark.parametrize("ranks, microbatches", [(2, 1), (3, 2)])
def test_used_on_some_ranks_or_on_none(stage, ranks, microbatches):
    """One process uses `first` for every row, and it stays at a sum of 3 without training it."""
    def fn(world):
        mesh = DeviceMesh(world, dp=ranks)
        model = sharded(stage, "tiny")(SometimesToy(), mesh)
        optimizer = attach(SGD(model.parameters(), 0.01), model, mesh)
        train_step(model, batches()[0], optimizer, num_microbatches=microbatches)
        grads = {p.name: p.grad is None for p in model.parameters()}
        return grads, everything(model.parameters(), mesh)

    def alone(world):
        mesh = DeviceMesh(world, dp=ranks)
        model = dp.parallelize(SometimesToy(), mesh["dp"])
        train_step(model, batches()[0], SGD(model.parameters(), 0.01),
                   num_microbatches=microbatches)
        return everything(model.parameters(), mesh)

    expected = run_threads(ranks, alone)[0]
    for grads, found in run_threads(ranks, fn):
        assert [name for name, none in grads.items() if none] == ["no"]
        for name, x in expected.items():
            assert np.allclose(found[name], x, rtol=1e-13), name


class Skipping(Toy):
    """A rank without row 0 leaves part p1 out."""

    def forward(self, batch, x=None):
        batch = self.localize(batch)
        for name, part in self.parts.items():
            y = part(x, batch)
            x = x if name == "p1" and 0 not in batch.rows else y
        return x


def test_a_backward_that_leaves_a_part_out_keeps_the_order_of_messages():
    def fn(world, wrap):
        mesh = DeviceMesh(world, dp=world.size)
        model = wrap(Skipping(), mesh)
        optimizer = SGD(model.parameters(), 0.01)
        optimizer = attach(optimizer, model, mesh) if hasattr(model, "gather_all") else optimizer
        train_step(model, batches()[0], optimizer)
        return everything(model.parameters(), mesh)

    expected = run_threads(3, fn, lambda model, mesh: dp.parallelize(model, mesh["dp"]))[0]
    for found in run_threads(3, fn, sharded(3), timeout=600):
        for name, x in expected.items():
            assert np.allclose(found[name], x, rtol=1e-13), name


# ------------------------------------------------------------------- what is refused

def test_there_is_no_stage_4():
    with pytest.raises(BadInput, match="no stage 4; use 1"):
        zero.parallelize(Toy(), None, 4)


@stages
def test_a_second_backward_on_an_old_sum_is_refused(stage):
    def fn(world):
        model = sharded(stage)(tiny(), DeviceMesh(world, dp=2))
        batch = model.localize(batches()[0])
        model(batch).backward()
        with pytest.raises(RuntimeError, match=r"still holds .* zero_grad\(\)"):
            model(batch).backward()
        model.zero_grad()
        model(batch).backward()
        return True
    assert run_threads(2, fn) == [True] * 2


def test_a_parameter_outside_of_the_parts_is_refused_by_stage_3():
    def fn(world):
        model = Toy()
        model.extra = Parameter(np.ones(3), "extra")
        with pytest.raises(BadInput, match="extra is in no part of the model"):
            sharded(3)(model, DeviceMesh(world, dp=2))
        return True
    assert run_threads(2, fn) == [True] * 2


def test_a_part_that_runs_twice_is_refused_by_stage_3():
    class Twice(Toy):
        def __init__(self):
            super().__init__()
            self.parts = dict(list(self.parts.items())[:2]) | {"again": self.parts["p5"],
                                                               "end": self.parts["end"]}

    def fn(world):
        model = sharded(3)(Twice(), DeviceMesh(world, dp=2))
        with pytest.raises((RuntimeError, BadInput), match="once"):
            model(model.localize(batches()[0])).backward()
        return True
    assert run_threads(2, fn) == [True] * 2


@stages
def test_a_step_that_fails_leaves_nothing_behind(stage):
    def fn(world):
        mesh = DeviceMesh(world, dp=2)
        model = sharded(stage)(perturb(tiny()), mesh)
        optimizer = attach(SGD(model.parameters(), 0.1), model, mesh)
        block = model.parts["blocks.1"].__dict__

        def broken(*args):
            raise ValueError("broken")

        block["forward"] = broken
        with pytest.raises(ValueError, match="broken"):
            train_step(model, batches()[0], optimizer)
        del block["forward"]
        train_step(model, batches()[0], optimizer)
        whole = everything(model.parameters(), mesh)
        model.close()
        return whole

    def plain(world):
        model = perturb(tiny())
        train_step(model, batches()[0], SGD(model.parameters(), 0.1))
        return {p.name: p.data for p in model.parameters()}

    expected = run_threads(1, plain)[0]
    for found in run_threads(2, fn):
        assert all(np.allclose(found[name], x, rtol=1e-12) for name, x in expected.items())


def test_one_message_takes_pieces_of_any_size_home():
    def fn(world):
        wholes = [np.arange(n) + 100.0 * n for n in (5, 1, 7, 0, 19)]
        cuts = [np.array_split(np.pad(x, (0, -len(x) % world.size)), world.size) for x in wholes]
        with world.counting() as sent:
            found = buckets.gather([c[world.rank] for c in cuts],
                                   [np.empty(len(x)) for x in wholes], world)
        assert sent.by_label["all_gather"].messages <= world.size - 1
        return all(np.array_equal(a, b) for a, b in zip(found, wholes))
    for ranks in (1, 2, 3, 4, 8):
        assert all(run_threads(ranks, fn))


# ------------------------------------------------------------------- what is held, over a step

def held_over_a_step(world, stage, microbatches, options, tied=True):
    mesh = DeviceMesh(world, dp=world.size)
    model = zero.parallelize(perturb(tiny(tied=tied)), mesh["dp"], stage, **options)
    optimizer = attach(OPTIMIZERS["AdamW"](model.parameters()), model, mesh)
    train_step(model, batches()[0], optimizer)
    points = ledger.timeline(model, batches()[1], optimizer, num_microbatches=microbatches)
    whole = [p.full_shape for p in model.parameters()]
    units = [8 * sum(int(np.prod(p.full_shape)) for p in part.parameters())
             for part in model.parts.values()]
    return points, [int(np.prod(shape)) for shape in whole], units


@stages
@pytest.mark.parametrize("ranks, microbatches", [(2, 1), (3, 3), (4, 1)])
def test_bytes_held_between_steps_are_those_of_the_formula(stage, ranks, microbatches):
    found = run_threads(ranks, held_over_a_step, stage, microbatches, {})
    for rank, (points, numbers, _) in enumerate(found):
        expected = cost.zero_held(numbers, cost.Group(ranks, rank), stage)
        name, end = points[-1]
        assert name == "step" and end["gathered"] == end["activations"] == 0
        flags = 8 * ranks * len(numbers) if stage == 1 else 0
        assert (end["parameters"], end["gradients"] + end["buckets"] - flags,
                end["optimizer"]) == tuple(8 * n for n in expected)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_stage_3_gathers_two_parts_at_most(microbatches, tied):
    for points, _, units in run_threads(3, held_over_a_step, 3, microbatches, {}, tied):
        forward = [held["gathered"] for name, held in points if name.startswith("forward")]
        pairs = [a + b for a, b in zip(units, [*units[1:], 0])]
        assert forward == pairs * microbatches
        assert max(held["gathered"] for _, held in points) == max(pairs)


def test_stage_2_holds_no_more_than_a_few_buckets():
    """One that fills, and those on their way; in stage 1 all stay."""
    peaks = {}
    for stage in (1, 2):
        points, numbers, _ = run_threads(2, held_over_a_step, stage, 1, SMALL)[0]
        peaks[stage] = max(held["buckets"] for _, held in points)
    largest = 8 * (max(numbers) + 2)
    assert peaks[1] >= 8 * sum(numbers) and peaks[2] <= (zero.IN_FLIGHT + 1) * largest


# ------------------------------------------------------------------- with a pipeline

def staged(model, mesh):
    return pp.split(model, mesh["pp"], "1f1b")


@pytest.mark.parametrize("tied", [True, False])
def test_stage_1_with_a_pipeline(tied):
    proven(1, "tiny", staged, ["AdamW"], dp=2, pp=2, num_microbatches=2, tied=tied)


@pytest.mark.parametrize("stage", [2, 3])
def test_other_stages_with_a_pipeline_are_refused(stage):
    from types import SimpleNamespace
    sizes = {axis: 2 if axis == "pp" else None for axis in parallel.OFFERED}
    args = SimpleNamespace(batch=4, sp=None, zero=stage, schedule=None, chunks=None, **sizes)

    def fn(world):
        with pytest.raises(BadInput, match=f"--zero {stage} .* use --zero 1"):
            parallel.make_mesh(args, world)
        return True
    assert run_threads(2, fn) == [True] * 2


# ------------------------------------------------------------------- a ZeRO of one's own

def own_zero(model, comm):
    """All that a file of one's own needs: a function of a plain model and a group of ranks."""
    return zero.parallelize(model, comm, 2)


def own_optimizer(optimizer, model, mesh):
    return zero.attach(optimizer, model)


class Forgets(zero.Stage2):
    """Keeps the last micro-batch only."""

    def collect(self, bucket, mine):
        self.sums = {name: g for name, g in self.sums.items() if name not in bucket.columns}
        super().collect(bucket, mine)


def test_a_zero_of_ones_own_is_checked():
    def mine(way):
        return verify.layout(lambda model, mesh: way(model, mesh["dp"]), own_optimizer, dp=3,
                             num_microbatches=2)
    assert mine(own_zero).equal
    wrong = mine(Forgets)
    assert not wrong.equal and wrong.line().startswith("DIVERGED at step 0: ")
