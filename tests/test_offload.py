"""Offload: the same numbers bit for bit, bytes by formula, two chunks here, files that are gone."""
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from minidist import BadInput, checkpoint, cost, ledger, offload, parallel, verify
from minidist.engine.data import random_batch
from minidist.engine.nn import Parameter
from minidist.engine.optim import SGD, AdamW
from minidist.mesh import DeviceMesh
from minidist.placement import everything
from minidist.ranks.comm import run_threads, solo
from minidist.ranks.link import Link
from minidist.step import train_step
from tests.layout import check_layout
from tests.models import tiny
from tests.mpi import mpi

AXES = "dp", "tp", "cp", "pp"
LAYOUTS = [dict(), dict(tp=2, sequence="again"), dict(dp=2), dict(dp=3, zero=1), dict(dp=2, zero=2),
           dict(dp=3, zero=3), dict(dp=2, tp=2, zero=3), dict(cp=2), dict(pp=2)]
MAKERS = {"SGD": partial(SGD, lr=0.5, momentum=0.9), "AdamW": partial(AdamW, lr=0.01, eps=1e-5)}


def attached(comm, options, make, tier, chunk=1000, **sizes):
    """A model that lies as the options say, and its optimizer, whose state lies in a tier."""
    options = dict(options)
    mesh = DeviceMesh(comm, **{axis: options.pop(axis, 1) for axis in AXES})
    sizes = dict(layers=3, heads=6, kv_heads=6, width=24, vocab=14, dropout=0.2) | sizes
    model = parallel.spread(verify.perturb(tiny(**sizes)), mesh, options.pop("sequence", None),
                            **options)
    optimizer = parallel.equip(make(model.parameters()), model)
    if tier:
        offload.attach(optimizer, model, tier, comm, chunk)
    return mesh, model, optimizer


def trained(comm, options, make, tier, steps=3, microbatches=2, **more):
    mesh, model, optimizer = attached(comm, options, make, tier, **more)
    for step in range(steps):
        batch = random_batch(14, 8, 6, seed=1, step=step, ragged=True)
        train_step(model, batch, optimizer, mesh, microbatches, 0.5)
    return model, optimizer


def numbers(comm, *args, **more):
    """Parameters, gradients and optimizer state after some steps."""
    model, optimizer = trained(comm, *args, **more)
    return {p.name: [p.data, p.grad, *optimizer.state.get(p.name, ())] for p in model.parameters()}


def same(found, reference):
    assert found.keys() == reference.keys()
    for name, arrays in reference.items():
        for a, b in zip(found[name], arrays, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def ranks(options):
    return int(np.prod([options.get(axis, 1) for axis in AXES]))


# ------------------------------------------------------------------ the same training

@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_equal_to_resident_bit_for_bit(options, make, tmp_path):
    """D05, D14, D28: micro-batches, clipping by the norm of all, sizes that do not divide."""
    reference = run_threads(ranks(options), numbers, options, MAKERS[make], None)
    tiers = offload.Host, partial(offload.File, folder=tmp_path)
    for tier, chunk in zip(tiers, (1000, 1 << 20)):
        found = run_threads(ranks(options), partial(numbers, chunk=chunk), options, MAKERS[make],
                            tier)
        for mine, whole in zip(found, reference):
            same(mine, whole)


@pytest.mark.parametrize("options", [dict(), dict(dp=2, zero=3), dict(dp=2, tp=2, zero=1)], ids=str)
def test_the_same_training_as_one_process(options, tmp_path):
    options = dict(options)
    strategy = partial(parallel.spread, zero=options.pop("zero", None))

    def equip(optimizer, model, mesh):
        return parallel.equip(optimizer, model, mesh, tmp_path)
    check_layout(strategy, 2, equip=equip, kv_heads=4, microbatches=3, **options)


@mpi(2)
def test_the_same_over_mpi(comm, tmp_path):
    options = dict(dp=2, zero=3)
    tier = partial(offload.File, folder=tmp_path)
    same(numbers(comm, options, MAKERS["AdamW"], tier),
         numbers(comm, options, MAKERS["AdamW"], None))


def test_state_that_is_there_already_moves_along_and_can_be_set():
    """As after a checkpoint is loaded, before or after the state is moved."""
    model, plain = trained(solo(), {}, MAKERS["AdamW"], None)
    before = {name: [x.copy() for x in arrays] for name, arrays in plain.state.items()}
    offload.attach(plain, model, offload.Host)
    same(plain.state, before)
    model, optimizer = trained(solo(), {}, MAKERS["AdamW"], offload.Host, steps=1)
    name = next(iter(before))
    optimizer.state[name] = before[name]
    np.testing.assert_array_equal(optimizer.offload.views[name], before[name])
    optimizer.state.pop(name)                               # as if it had never been updated
    for p in model.parameters():
        p.grad = np.ones_like(p.data)
    optimizer.step()
    scale = (1 - optimizer.betas[0]) * np.ones_like(before[name][0])
    np.testing.assert_array_equal(optimizer.state[name][0], scale)


def test_checkpoints_know_no_difference(tmp_path):
    def rank(comm, before, after, kind):
        mesh, model, optimizer = attached(comm, dict(dp=2, zero=3), MAKERS["AdamW"], before)
        batches = [random_batch(14, 8, 6, seed=1, step=step) for step in range(3)]
        train_step(model, batches[0], optimizer, mesh)
        checkpoint.save(tmp_path / kind, model, optimizer, mesh, 1)
        train_step(model, batches[1], optimizer, mesh)
        whole = everything(model.parameters(), mesh)
        mesh, model, optimizer = attached(comm, dict(dp=2, zero=3), MAKERS["AdamW"], after)
        checkpoint.load(checkpoint.find(tmp_path / kind, comm), model, optimizer, mesh)
        train_step(model, batches[1], optimizer, mesh)
        same({"all": whole.values()}, {"all": everything(model.parameters(), mesh).values()})

    for kind, tiers in enumerate([(None, offload.Host), (offload.Host, None)]):
        run_threads(2, rank, *tiers, str(kind))


def test_dtypes_may_differ_and_gradients_may_lack():
    def made():
        rng = np.random.default_rng(0)
        params = [Parameter(rng.standard_normal(n).astype(dtype), f"p{i}") for i, (n, dtype) in
                  enumerate([(7, "f4"), (33, "f8"), ((3, 5), "f2"), ((), "f4"), (9, "f8")])]
        params[4].requires_grad = False
        return params, AdamW(params, 0.1)

    (ours, away), (theirs, here) = made(), made()
    offload.attach(away, None, offload.Host, chunk=64)
    for step in range(3):
        for params, optimizer in (ours, away), (theirs, here):
            for i, p in enumerate(params[:4]):
                p.grad = None if i == step else np.full(p.shape, step + 1, p.dtype)
            optimizer.step()
    same({p.name: [p.data] for p in ours}, {p.name: [p.data] for p in theirs})
    same(away.state, here.state)
    assert away.state.keys() == {"p0", "p1", "p2", "p3"}


# ------------------------------------------------------------------ what moves, and what is here

@pytest.mark.parametrize("make, slots", [("SGD", 1), ("AdamW", 2)])
@pytest.mark.parametrize("chunk", [64, 1000, 1 << 20])
def test_a_step_moves_the_state_here_and_back(make, slots, chunk):
    model, optimizer = trained(solo(), {}, MAKERS[make], offload.Host, steps=2, chunk=chunk)
    n, account = sum(p.size for p in model.parameters()), optimizer.offload.account()
    there, read, written, buffers = cost.offload(n, 8, slots, chunk)
    assert account == {"elsewhere": there, "read": 2 * read, "written": 2 * written}
    assert there == read == written == slots * n * 8
    assert ledger.held(model, optimizer).optimizer == optimizer.offload.buffers.nbytes == buffers
    assert buffers == 2 * slots * max(64, min(chunk // 64 * 64 + 64 * (chunk % 64 > 0), n * 8))


@pytest.mark.parametrize("stage, microbatches, tied", [
    (1, 1, True), (2, 2, True), (3, 1, True), (3, 3, True), (3, 2, False)])
def test_what_zero_moves(stage, microbatches, tied):
    def rank(comm):
        model, optimizer = trained(comm, dict(dp=3, zero=stage), MAKERS["AdamW"], offload.Host, 1,
                                   microbatches, tied=tied)
        return optimizer.offload.account(), ledger.classes(model, optimizer)

    whole = tiny(layers=3, heads=6, kv_heads=6, width=24, vocab=14, tied=tied)
    numbers = [p.size for p in whole.parameters()]
    for r, (account, held) in enumerate(run_threads(3, rank)):
        group, gathered = cost.Group(3, r), None
        if stage == 3:
            parts = cost.zero_parts(numbers, 3, tied)[1]
            gathered = 2 * microbatches * sum(-(-n // 3) for part in parts for n in part)
            assert held["parameters"] == held["gathered"] == 0
        state = cost.zero_held(numbers, group, stage)[2]
        moved = cost.offload(state // 2, 8, chunk=1000, gathered=gathered)
        assert tuple(account.values()) == moved[:3] and held["optimizer"] == moved.buffers


def test_chunks_without_a_gradient_stay_where_they_are():
    params = [Parameter(np.ones(64), f"p{i}") for i in range(4)]
    optimizer = offload.attach(AdamW(params, 0.1), None, offload.Host, chunk=512)
    params[2].grad = np.ones(64)
    optimizer.step()
    assert optimizer.offload.tier.got == 2 * 512 and optimizer.state.keys() == {"p2"}


def test_a_link_takes_its_time():
    tier = offload.Host(4096, Link(bandwidth=4096 / 0.05))
    began = time.monotonic()
    tier.put(0, np.arange(512.0))
    into = np.empty(512)
    tier.get(0, into)
    assert time.monotonic() - began >= 0.1 and np.array_equal(into, np.arange(512.0))


@pytest.mark.parametrize("sizes, most, expected", [
    ([5], 5, [[(0, 0, 5)]]), ([5], 2, [[(0, 0, 2)], [(0, 2, 4)], [(0, 4, 5)]]),
    ([2, 0, 3], 4, [[(0, 0, 2), (2, 0, 2)], [(2, 2, 3)]]), ([], 3, []), ([0], 3, []),
    ([1, 1, 1], 2, [[(0, 0, 1), (1, 0, 1)], [(2, 0, 1)]])])
def test_cut(sizes, most, expected):
    assert offload.cut(sizes, most) == expected


class Lazy:
    """A background thread as slow as it can be: it works only when somebody waits for it."""

    def __init__(self):
        self.todo, self.log = [], []

    def submit(self, fn, chunk, buffer):
        def result():
            while job in self.todo:
                fn, *args, _ = self.todo.pop(0)
                fn(*args)
                self.log.append((fn.__name__, args[0]))
        job = fn, chunk, buffer, object()
        self.todo.append(job)
        return SimpleNamespace(result=result)


class Eager(Lazy):
    """One that is done at once."""

    def submit(self, fn, chunk, buffer):
        future = super().submit(fn, chunk, buffer)
        future.result()
        return future


@pytest.mark.parametrize("thread", [Lazy, Eager])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 6])
def test_buffers_in_flight_are_never_overwritten(count, thread):
    there, buffers, thread = list(range(count)), [[None], [None]], thread()

    def get(i, buffer):
        buffer[0] = there[i]

    def put(i, buffer):
        there[i] = buffer[0]

    for i, buffer in offload.pass_by(range(count), buffers, get, put, thread.submit):
        assert buffer == [i], "not arrived, or overwritten"
        buffer[0] += 100
        if thread.__class__ is Eager and i + 1 < count:
            assert buffers[(i + 1) % 2] == [i + 1], "the next one is not on its way"
    assert there == [100 + i for i in range(count)] and not thread.todo


# ------------------------------------------------------------------ files, and what goes wrong

def test_an_optimizer_without_state_is_refused():
    with pytest.raises(BadInput, match="keeps no state"):
        offload.attach(SGD([Parameter(np.ones(3), "p")], 0.1), None, offload.Host)


@pytest.mark.parametrize("folder", ["missing", "file", "/proc"])
def test_a_directory_that_cannot_be_used_is_refused(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=f"--offload .*{folder}: .*; this rank keeps .* bytes there"):
        trained(solo(), {}, MAKERS["AdamW"], partial(offload.File, folder=tmp_path / folder))


def full(monkeypatch, after):
    """Let the disk be full after so many writes: of the next one, it takes a part first."""
    calls, pwritev = [], os.pwritev

    def write(file, data, at):
        calls.append(1)
        if len(calls) > after + 1:
            raise OSError(28, os.strerror(28))
        return pwritev(file, [data[0][:9]] if len(calls) > after else data, at)

    monkeypatch.setattr(os, "pwritev", write)


def test_a_disk_that_is_full_is_refused_before_the_first_step_on_all_ranks(monkeypatch, tmp_path):
    full(monkeypatch, after=2)                              # enough for two of three ranks

    def rank(comm):
        with pytest.raises(BadInput, match="No space left on device; this rank keeps") as error:
            attached(comm, dict(dp=3, zero=1), MAKERS["AdamW"],
                     partial(offload.File, folder=tmp_path), 1 << 20)
        return str(error.value)
    assert len(set(run_threads(3, rank))) == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["full", "cut"])
def test_a_step_that_stops_halfway_is_told_and_is_the_last(what, monkeypatch, tmp_path):
    _, model, optimizer = attached(solo(), {}, MAKERS["AdamW"],
                                   partial(offload.File, folder=tmp_path))
    for p in model.parameters():
        p.grad = np.ones_like(p.data)
    if what == "cut":
        os.ftruncate(optimizer.offload.tier.file.fileno(), 9000)
    else:
        full(monkeypatch, after=3)
    with pytest.raises(BadInput, match="cut short" if what == "cut" else "No space left"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="ended halfway"):
        optimizer.step()


def test_the_file_has_no_name_so_its_room_is_given_back_however_the_run_ends(tmp_path):
    tier = offload.File(1 << 20, tmp_path)
    status = os.fstat(tier.file.fileno())
    assert status.st_nlink == 0 and 512 * status.st_blocks >= 1 << 20


def command(*flags):
    return [sys.executable, "-m", "minidist.train", "--preset", "lesson", "--layers", "1",
            "--batch", "4", "--sample", "0", "--no-figure", *flags]


def test_the_command_gives_the_same_parameters_and_says_what_moved(tmp_path):
    outputs = [subprocess.run(command("--steps", "2", *flags), capture_output=True, text=True,
                              timeout=600).stdout.splitlines()
               for flags in ((), ("--offload", str(tmp_path)))]
    digests = [line for lines in outputs for line in lines if "sha256" in line]
    assert len(digests) == 2 and len(set(digests)) == 1 and not list(tmp_path.iterdir())
    moved = [line for line in outputs[1] if line.startswith("offload")]
    assert re.fullmatch(r"offload    this rank: 2\d\d,\d+ bytes elsewhere, (\d+,\d+ bytes) read, "
                        r"\1 written", *moved)


def test_nothing_is_left_after_an_interrupt(tmp_path):
    job = subprocess.Popen(command("--steps", "1000000", "--offload", str(tmp_path)),
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(3):
        job.stdout.readline()                               # it has begun
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=60)
    assert job.returncode not in (0, None) and not list(tmp_path.iterdir())
