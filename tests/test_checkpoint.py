"""A checkpoint is the training: any layout goes on from any other's, and nothing half-written,
damaged or incomplete is ever gone on from."""
import errno
import os
import re
import threading
from tempfile import gettempdir

import numpy as np
import pytest

from minidist import BadInput, checkpoint, moe, parallel, storage, verify
from minidist.engine.data import random_batch
from minidist.engine.gpt import GPT, GPTConfig
from minidist.engine.nn import Module, Parameter
from minidist.engine.optim import SGD, AdamW, warmup_cosine
from minidist.mesh import DeviceMesh
from minidist.placement import join, merge
from minidist.ranks.comm import run_threads, solo
from minidist.ranks.threads import Stopped
from minidist.step import train_step

RATE = warmup_cosine(0.02, 2, 8)
OPTIMIZERS = {"adamw": lambda ps: AdamW(ps, RATE, eps=verify.ADAMW_EPS),
              "sgd": lambda ps: SGD(ps, RATE, momentum=0.9)}
# name: sizes of axes, then what parallel.spread takes, and micro-batches
LAYOUTS = {
    "one": (dict(), {}, 1),
    "accumulate": (dict(), {}, 3),
    "dp3": (dict(dp=3), {}, 1),
    "zero1": (dict(dp=4), dict(zero=1), 1),
    "zero2": (dict(dp=2), dict(zero=2), 2),
    "zero3": (dict(dp=3), dict(zero=3), 1),
    "tp4": (dict(tp=4), {}, 1),
    "sp": (dict(tp=2), dict(sequence="again"), 1),
    "zigzag": (dict(cp=2), dict(method="zigzag"), 1),
    "ulysses": (dict(cp=2), dict(method="ulysses"), 1),
    "pp3": (dict(pp=3), {}, 3),
    "interleaved": (dict(pp=2), dict(schedule="interleaved", chunks=2), 4),
    "recompute": (dict(dp=2), dict(recompute="blocks"), 1),
    "dp2tp2": (dict(dp=2, tp=2), dict(zero=1), 1),
    "dp2pp2": (dict(dp=2, pp=2), dict(zero=1), 2),
    "zero3tp2": (dict(dp=2, tp=2), dict(zero=3, attention="tiled"), 1),
    "offload": (dict(), dict(offload=gettempdir()), 1),
    "zero3offload": (dict(dp=2), dict(zero=3, offload=gettempdir()), 2),
    "cube": (dict(dp=2, pp=2, tp=2), dict(sequence="keep"), 2),
}
PAIRS = list(zip(LAYOUTS, [*LAYOUTS][7:] + [*LAYOUTS][:7]))
OTHERS = {                              # which train something else: pairs among themselves
    "fp16": (dict(dp=2), dict(zero=1, precision="fp16"), 1),
    "fp16tp": (dict(tp=2), dict(sequence="again", precision="fp16"), 2),
    "bf16": (dict(dp=3), dict(zero=3, precision="bf16"), 1),
    "bf16pp": (dict(pp=2, dp=2), dict(precision="bf16"), 2),
    "experts": (dict(tp=2), dict(experts=True), 1),
    "ep2": (dict(dp=4, ep=2), dict(experts=True), 1),
    "ep4": (dict(dp=4, ep=4), dict(experts=True, zero=1), 1),
}
PAIRS += [("fp16", "fp16tp"), ("fp16tp", "fp16"), ("bf16", "bf16pp"), ("bf16pp", "bf16"),
          ("experts", "ep2"), ("ep2", "ep4"), ("ep4", "experts")]
LAYOUTS |= OTHERS
ROUTING = moe.MoEConfig(experts=4, top_k=2, bias=0.1)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """A power failure cannot be tested here, and syncs take half of these tests' time."""
    monkeypatch.setattr(storage.os, "fsync", lambda handle: None)


class Run:
    """One rank's model, optimizer and mesh, in one of the layouts."""

    def __init__(self, world, layout, optimizer="adamw", **config):
        sizes, options, self.pieces = LAYOUTS[layout]
        self.mesh = DeviceMesh(world, **sizes)
        config = GPTConfig(**{**verify.SMALL, "dropout": 0.2, "layers": 4, **config})
        plain = GPT(config, 0, np.float64)
        if options.get("experts"):
            moe.replace_mlps(plain, ROUTING)
        self.model = parallel.spread(verify.perturb(plain), self.mesh,
                                     **{"sequence": None, **options})
        self.optimizer = parallel.equip(OPTIMIZERS[optimizer](self.model.parameters()), self.model,
                                        self.mesh, options.get("offload"))

    def train(self, steps):
        """Take these steps.  -> losses"""
        return [train_step(self.model, random_batch(13, 8, 6, 7, step), self.optimizer, self.mesh,
                           self.pieces, max_norm=0.5).loss for step in steps]

    def numbers(self):
        """Gather all that the next step depends on.  -> {name: array}"""
        mine = {name: join(p, x, sliced=True)
                for name, p, x in checkpoint.tensors(self.model, self.optimizer)}
        held = {f"{p.name} as computed with": join(p, p.data)
                for p in self.model.parameters()}
        counts = {name: np.array(getattr(self.optimizer, name), float)
                  for name in self.optimizer.counters}
        return merge(mine | held, self.mesh) | counts

    def save(self, folder, step, **options):
        return checkpoint.save(folder, self.model, self.optimizer, self.mesh, step, **options)

    def load(self, folder):
        found = checkpoint.find(folder, self.mesh.world)
        checkpoint.load(found, self.model, self.optimizer, self.mesh)
        return found


def on(layout, work, *args, **options):
    """Let every rank of a layout do work(its Run, ...).  -> rank 0's result"""
    return run_threads(size(layout), lambda world: work(Run(world, layout, **options), *args),
                       timeout=600)[0]


def size(layout):
    """Count its ranks: ep is a factor of dp."""
    return int(np.prod([n for axis, n in LAYOUTS[layout][0].items() if axis != "ep"], dtype=int))


def saved(run, folder, steps=1):
    """Train, save, and train on.  -> losses of the second half, the numbers at the end"""
    run.train(range(steps))
    run.save(folder, steps)
    return run.train(range(steps, 2 * steps)), run.numbers()


def resumed(run, folder, steps=1):
    run.load(folder)
    return run.train(range(steps, 2 * steps)), run.numbers()


def assert_close(ours, theirs, bound):
    """Compare losses and numbers; bound 0: bit for bit."""
    (losses, numbers), (other_losses, others) = ours, theirs
    assert np.abs(np.subtract(losses, other_losses)).max() <= bound
    assert numbers.keys() == others.keys()
    for name, x in numbers.items():
        gap = verify.difference(x, others[name], verify.size(x))
        assert gap <= bound, f"{name}: {gap}"


# ---------------------------------------------------------------------- any layout, any other

CASES = [(*pair, "adamw") for pair in PAIRS] + [(*pair, "sgd") for pair in PAIRS[3::6]]


@pytest.mark.parametrize("first, second, optimizer", CASES)
def test_D32_D33_going_on_elsewhere_is_the_same_training(first, second, optimizer, tmp_path):
    """2k steps = k, a checkpoint, k: bit by bit on the same mesh, to 1e-12 on another."""
    straight = on(first, saved, tmp_path, optimizer=optimizer)
    assert_close(on(first, resumed, tmp_path, optimizer=optimizer), straight, 0)
    assert_close(on(second, resumed, tmp_path, optimizer=optimizer), straight, 1e-12)


def test_D12_going_on_draws_the_dropout_masks_that_would_have_come(tmp_path):
    """Three steps after three: masks and batches come from the step, not from a generator."""
    straight = on("recompute", saved, tmp_path, 3)
    assert_close(on("recompute", resumed, tmp_path, 3), straight, 0)


def test_D40_pieces_are_joined_by_coordinate_whatever_the_order_of_the_ranks(tmp_path):
    """tp outermost or innermost: the files are the same."""
    def files(world, order):
        mesh = DeviceMesh(world, dp=2, tp=2, order=order)
        model = parallel.spread(GPT(GPTConfig(**verify.SMALL)), mesh)
        folder = checkpoint.save(tmp_path / order[0], model, SGD(model.parameters(), 0.1), mesh)
        return {path.name: path.read_bytes() for path in folder.glob("*.npy")}

    one, other = (run_threads(4, files, order)[0]
                  for order in (("tp", "cp", "dp", "pp"), ("dp", "pp", "cp", "tp")))
    assert len(one) > 20 and one == other


@pytest.mark.parametrize("layout", ["dp3", "zero1", "zero3tp2", "pp3", "cube"])
def test_every_tensor_is_stored_once_and_the_ranks_share_the_writing(layout, tmp_path, monkeypatch):
    def share(folder, name, x, entries):
        wrote.append((name, x.nbytes, threading.get_ident()))
        original(folder, name, x, entries)

    wrote, original = [], storage.write_tensor
    monkeypatch.setattr(storage, "write_tensor", share)
    folder = on(layout, Run.save, tmp_path, 0)
    names, sizes, ranks = zip(*wrote)
    plain = GPT(GPTConfig(**{**verify.SMALL, "layers": 4}), 0, np.float64).parameters()
    stored = [p.name + moment for p in plain for moment in ("", ".m", ".v")]
    assert sorted(names) == sorted(stored)
    assert sorted(f.name for f in folder.iterdir()) == sorted(
        ["index.json", *(f"{name}.npy" for name in stored)])
    assert sum(sizes) == 3 * sum(p.data.nbytes for p in plain)
    counts = np.unique(ranks, return_counts=True)[1]
    assert len(counts) == size(layout)
    assert "pp" in LAYOUTS[layout][0] or max(counts) < 2 * min(counts)


# ---------------------------------------------------------------------- nothing half-written

class Two(Module):
    """A model of two parameters, so that a checkpoint is eight files."""

    def __init__(self):
        self.w, self.b = Parameter(np.zeros((3, 4)), "w"), Parameter(np.zeros(4), "b")


def two(value):
    """Make a model and an optimizer in which every number is `value`."""
    model = Two()
    optimizer = AdamW(model.parameters(), 0.1)
    optimizer.t = value
    for p in model.parameters():
        optimizer.moments(p, p.data)
    for _, _, x in checkpoint.tensors(model, optimizer):
        x[...] = value
    return model, optimizer


def save_two(folder, value, ranks=2, **options):
    """Save `two(value)` as step `value`, on thread ranks."""
    run_threads(ranks, lambda world: checkpoint.save(
        folder, *two(value), DeviceMesh(world, dp=ranks), step=value, **options), timeout=600)


def load_two(folder, ranks=2):
    """Load what there is.  -> the value that every number has, what was refused"""
    def load(world):
        model, optimizer = two(0)
        found = checkpoint.find(folder, world)
        checkpoint.load(found, model, optimizer, DeviceMesh(world, dp=ranks))
        return {optimizer.t, *(v for _, _, x in checkpoint.tensors(model, optimizer)
                               for v in x.flat)}, found.refused
    (values, refused), *others = run_threads(ranks, load, timeout=600)
    assert len(values) == 1 and all(other == (values, refused) for other in others)
    return values.pop(), refused


MKDIR = os.mkdir


class Killed(BaseException):
    """What stops a rank at once; nothing catches it."""


class Disk:
    """Counts what is done to the disk, and at the given point does half of it and stops."""

    def __init__(self, monkeypatch, point, error):
        self.point, self.error, self.count, self.lock = point, error, 0, threading.Lock()
        for name in ("rename", "replace", "fsync", "mkdir"):
            monkeypatch.setattr(storage.os, name, self.counted(getattr(storage.os, name)))
        monkeypatch.setattr(storage.shutil, "rmtree", self.counted(storage.shutil.rmtree))
        monkeypatch.setattr(storage.Hashed, "write", self.half(storage.Hashed.write))

    def here(self):
        with self.lock:
            self.count += 1
            return self.count == self.point

    def counted(self, do):
        def instead(*args, **options):
            if not (do is MKDIR and os.path.isdir(args[0])) and self.here():
                raise self.error
            return do(*args, **options)
        return instead

    def half(self, write):
        def instead(file, data):
            if self.here():
                file.file.write(data[:len(data) // 2])
                raise self.error
            return write(file, data)
        return instead


def points(monkeypatch, work):
    """Count the points at which `work` can be stopped."""
    with monkeypatch.context() as patch:
        disk = Disk(patch, 0, None)
        work()
    return disk.count


SCENES = {"the next step": dict(before=[1], value=2, keep=None),
          "the first": dict(before=[], value=1, keep=None),
          "the same step again": dict(before=[2], value=2, keep=None),
          "keep one": dict(before=[1, 2], value=3, keep=1)}


@pytest.mark.parametrize("scene", SCENES)
def test_D31_a_kill_at_any_point_leaves_a_whole_checkpoint(scene, tmp_path, monkeypatch):
    """Killed at every operation on the disk in turn: the one before or the new one loads."""
    before, value, keep = SCENES[scene].values()

    def begin(folder):
        for earlier in before:
            save_two(folder, earlier)
        return lambda: save_two(folder, value, keep=keep)

    total, found = points(monkeypatch, begin(tmp_path / "count")), set()
    assert total > 20
    for point in range(1, total + 1):
        folder = tmp_path / str(point)
        save = begin(folder)
        with monkeypatch.context() as patch:
            Disk(patch, point, Killed())
            with pytest.raises(Killed):
                save()
        if before or storage.committed(folder):
            found.add(load_two(folder)[0])
        save()
        assert load_two(folder) == (value, [])
        assert not list(folder.glob("*.part")) and not list(folder.glob("*.old"))
        assert not keep or len(storage.committed(folder)) == keep
    assert found == {*before[-1:], value}


@pytest.mark.parametrize("ranks", [1, 2])
def test_D31_a_full_disk_at_any_point_is_a_sentence_on_all_ranks(ranks, tmp_path, monkeypatch):
    def refused(world, folder):
        with pytest.raises(BadInput) as error:
            checkpoint.save(folder, *two(2), DeviceMesh(world, dp=ranks), step=2)
        return str(error.value)

    save_two(tmp_path / "count", 1, ranks)
    total = points(monkeypatch, lambda: save_two(tmp_path / "count", 2, ranks))
    for point in range(1, total + 1):
        folder = tmp_path / str(point)
        save_two(folder, 1, ranks)
        with monkeypatch.context() as patch:
            Disk(patch, point, OSError(errno.ENOSPC, "No space left on device", "the file"))
            said = run_threads(ranks, refused, folder)
            assert re.search("step_2 has failed: .*: No space left on device", said[0])
            assert said == said[:1] * ranks
        assert load_two(folder)[0] in (1, 2) and not list(folder.glob("step_*.part"))
        save_two(folder, 2, ranks)
        assert load_two(folder) == (2, [])


FILES = ["w.npy", "w.m.npy", "w.v.npy", "b.npy", "b.m.npy", "b.v.npy", "index.json", "latest"]


def flip(data, at):
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1:]


DAMAGES = {"first byte": lambda data: flip(data, 0), "a byte": lambda data: flip(data, 70),
           "last byte": lambda data: flip(data, len(data) - 1),
           "truncated": lambda data: data[:50],
           "longer": lambda data: data + b" ", "empty": lambda data: b"", "gone": None}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_D31_a_damaged_file_is_refused_by_name_and_the_older_one_loads(file, damage, tmp_path):
    for value in (1, 2):
        save_two(tmp_path, value)
    path = tmp_path / file if file == "latest" else tmp_path / "step_2" / file
    data = path.read_bytes()
    path.unlink()
    if DAMAGES[damage]:
        path.write_bytes(DAMAGES[damage](data))
    value, refused = load_two(tmp_path)
    assert value == (2 if file == "latest" else 1)
    assert len(refused) == 1 and str(path) in refused[0]
    if file != "latest":
        with pytest.raises(BadInput, match=re.escape(str(path))):
            load_two(tmp_path / "step_2")


def test_an_array_of_objects_is_never_unpickled(tmp_path):
    """Even if its checksum is right."""
    save_two(tmp_path, 1)
    folder, index = tmp_path / "step_1", storage.open_index(tmp_path / "step_1")
    entry = storage.write(folder / "w.npy", lambda file: np.save(file, np.array([print]),
                                                                 allow_pickle=True))
    index["tensors"]["w"] |= entry
    storage.write_json(folder / "index.json", index)
    with pytest.raises(BadInput, match="w.npy is no array of numbers"):
        load_two(tmp_path)


@pytest.mark.parametrize("change, words", [
    (lambda tensors: tensors.pop("w"), "it has no w"),
    (lambda tensors: tensors.pop("b.m"), "it has no b.m"),
    (lambda tensors: tensors.update(c=tensors["b"]), "it has c, for which there is no place here"),
    (lambda tensors: tensors["w"].update(shape=[4, 3]),
     r"it has w as float64 \[4, 3\], and here it is float64 \[3, 4\]"),
    (lambda tensors: tensors["w"].update(dtype="float32"), "it has w as float32"),
], ids=["missing", "missing-moment", "unexpected", "shape", "dtype"])
def test_D32_what_does_not_fit_is_named_before_anything_changes(change, words, tmp_path):
    save_two(tmp_path, 1)
    found = checkpoint.find(tmp_path, solo())
    change(found.index["tensors"])
    model, optimizer = two(5)
    with pytest.raises(BadInput, match=words):
        checkpoint.load(found, model, optimizer)
    assert optimizer.t == 5 and set(model.w.data.flat) == {5}


def test_D32_moments_of_another_optimizer_do_not_fit(tmp_path):
    save_two(tmp_path, 1)
    model = Two()
    for other in (SGD(model.parameters(), 0.1), SGD(model.parameters(), 0.1, momentum=0.9)):
        with pytest.raises(BadInput, match="more differ"):
            checkpoint.load(checkpoint.find(tmp_path, solo()), model, other)
    checkpoint.load(checkpoint.find(tmp_path, solo()), model)             # the parameters alone
    assert set(model.w.data.flat) == {1}


def test_there_is_nothing_to_read(tmp_path):
    for folder in (tmp_path, tmp_path / "missing", tmp_path / "step_1"):
        with pytest.raises(BadInput, match="there is no checkpoint to read in"):
            checkpoint.find(folder, solo())


def test_what_latest_names_comes_before_a_larger_number(tmp_path):
    """As when a run has gone back to an older checkpoint, and died."""
    for value in (1, 3, 2):
        save_two(tmp_path, value)
    assert load_two(tmp_path) == (2, [])


def test_keep(tmp_path):
    for value in (1, 2, 3, 11):
        save_two(tmp_path, value, keep=3)
    assert [path.name for path in storage.committed(tmp_path)] == ["step_11", "step_3", "step_2"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_11", "step_2", "step_3"]


# ---------------------------------------------------------------------- all ranks, or none

def test_D31_a_save_that_only_rank_0_calls_is_reported(tmp_path):
    def main(world):
        mesh = DeviceMesh(world, dp=2)
        if world.rank == 0:
            checkpoint.save(tmp_path, *two(1), mesh)
    with pytest.raises(Stopped, match="(?s)rank 0 waits .*checkpoint.save.*rank 1, which has fini"):
        run_threads(2, main, timeout=600)
    assert not storage.committed(tmp_path)


def test_all_ranks_save_the_same_step(tmp_path):
    with pytest.raises(ValueError, match="rank 0 saves .*step_0 and rank 1 saves .*step_1"):
        run_threads(2, lambda world: checkpoint.save(
            tmp_path, *two(1), DeviceMesh(world, dp=2), step=world.rank), timeout=600)
