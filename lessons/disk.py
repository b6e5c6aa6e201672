"""What the lesson on checkpoints does to a disk: it kills commits, loses what was not synced, flips
bytes; and it asks the two functions that have no disk."""
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from minidist import checkpoint, storage
from minidist.engine.nn import Parameter
from minidist.engine.optim import AdamW
from minidist.placement import Flat

MEMORY = "/dev/shm"                                 # files that are never really written, on Linux
OPERATIONS = ((os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree"),
              (storage.Hashed, "write"))
# before: the steps saved already; then step and value are saved, and killed
SCENES = {"next": ([1], 2), "first": ([], 1), "again": ([2], 2), "and again": ([2, 2], 2)}


class Killed(BaseException):
    """What stops a commit; nothing catches it."""


@contextmanager
def folder(lesson):
    """Make a directory that all ranks see, and that is gone afterwards."""
    path = lesson.share(temporary)
    try:
        yield Path(path)
        lesson.comm.barrier()
    finally:
        if lesson.comm.rank == 0:
            shutil.rmtree(path, ignore_errors=True)


def temporary():
    return tempfile.mkdtemp(dir=MEMORY if os.access(MEMORY, os.W_OK) else None)


class Watch:
    """Counts what is done to the disk, stops at one operation, and knows what is not synced."""

    def __init__(self, stop=None):
        self.stop, self.done, self.dirty, self.unsynced = stop, [], set(), 0

    def __enter__(self):
        self.originals = [(owner, name, getattr(owner, name)) for owner, name in OPERATIONS]
        for owner, name, original in self.originals:
            setattr(owner, name, self.watched(name, original))
        return self

    def __exit__(self, kind, *error):
        for owner, name, original in self.originals:
            setattr(owner, name, original)
        return kind is Killed

    def watched(self, name, original):
        def instead(*args, **options):
            self.done.append(words(name, args))
            if len(self.done) == self.stop:
                if name == "write":
                    args[0].file.write(args[1][:len(args[1]) // 2])
                raise Killed
            getattr(self, name, lambda *args: None)(*args)
            return original(*args, **options)
        return instead

    # what a power failure would lose: files, and names in directories, since the last sync

    def write(self, file, data):
        path = Path(file.file.name)
        self.dirty |= {os.stat(path).st_ino, os.stat(path.parent).st_ino}

    def fsync(self, handle):
        self.dirty.discard(os.fstat(handle).st_ino)

    def rename(self, source, target):
        inside = list(Path(source).iterdir()) if os.path.isdir(source) else []
        self.unsynced += any(os.stat(path).st_ino in self.dirty for path in [source, *inside])
        self.dirty.add(os.stat(Path(target).parent).st_ino)

    replace = rename


def words(name, args):
    """Say what an operation does."""
    if name in ("rename", "replace"):
        return f"rename {Path(args[0]).name} -> {Path(args[1]).name}"
    if name == "write":
        return f"write {Path(args[0].file.name).name}"
    return name.replace("fsync", "sync")


def prepare(place, step, value):
    """Write and sync the one tensor of a checkpoint, not committed yet.  -> target, index"""
    target, entries = Path(place) / f"step_{step}", {}
    storage.prepare(target)
    part = storage.beside(target, storage.PART)
    storage.write_tensor(part, "x", np.full(3, value), entries)
    storage.sync(storage.tensor_file(part, "x"))
    return target, {"step": step, "tensors": entries}


def look(place):
    """Load what a run would go on from.  -> value or None, what is not in order"""
    paths, wrong = storage.candidates(Path(place))
    loaded = None
    for path in paths:
        try:
            index = storage.open_index(path)
            for name, entry in index["tensors"].items():
                storage.read(storage.tensor_file(path, name), entry)
            if loaded is None:
                loaded = int(storage.read_tensor(path, "x")[0])
        except storage.Damaged as error:
            wrong.append(str(error))
    return loaded, [line.replace(f"{place}/", "") for line in wrong]


def kills(commit, scene="next"):
    """Kill a commit before each of its operations in turn.

    -> [(operation, value loaded, what is not in order)], the last one not killed; unsynced"""
    (before, step), rows, going = SCENES[scene], [], True
    while going:
        place = temporary()
        for value, earlier in enumerate(before, 1):
            commit(*prepare(place, earlier, value))
        target, index = prepare(place, step, len(before) + 1)
        with Watch(stop=len(rows) + 1) as watch:
            commit(target, index)
        going = len(watch.done) > len(rows)
        rows.append((watch.done[-1] if going else "nothing: not killed", *look(place)))
        left = len(list(Path(place).glob("step_*.part"))) + (os.stat(place).st_ino in watch.dirty)
        shutil.rmtree(place)
    return rows, watch.unsynced + left


def trials(commit):
    """Kill a commit in every scene.  -> how often something was wrong, by kind"""
    found = dict(lost=0, untrue=0, unsynced=0, unnoticed=flips())
    for scene, (before, _) in SCENES.items():
        rows, unsynced = kills(commit, scene)
        old, new = len(before) or None, len(before) + 1
        found["lost"] += sum(value not in (old, new) for _, value, _ in rows[:-1])
        found["lost"] += rows[-1][1] != new
        found["untrue"] += sum(bool(wrong) for _, _, wrong in rows) if scene == "next" else 0
        found["unsynced"] += unsynced
    return found


def flips():
    """Flip a byte in each file of a checkpoint.  -> how many nobody noticed"""
    place, unnoticed = temporary(), 0
    target, index = prepare(place, 1, 1)
    storage.commit(target, index)
    for file in [*target.iterdir(), target.parent / storage.LATEST]:
        data = file.read_bytes()
        at = len(data) - 3
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
        unnoticed += not look(place)[1]
        file.write_bytes(data)
    shutil.rmtree(place)
    return unnoticed


# ---------------------------------------------------------- the functions that have no disk

def questions(lesson):
    """Ask slots and fill, one by one."""
    comm = lesson.comm
    with lesson.asking() as ask:
        for shape in (7,), (3, 5), (2, 2):
            p = Parameter(np.zeros(shape), "w")
            flat = Flat(shape, comm)
            p.sliced["dp"] = flat
            whole = np.arange(1.0, p.size + 1).reshape(shape)
            mine = whole.reshape(-1)[flat.mine]
            piece = np.zeros(mine.size)
            ask("fill", f"my piece of {list(shape)} over {comm.size} ranks, without its padding")
            kept = checkpoint.fill(p, piece, whole)
            ask.right("the piece", piece, mine)
            ask.right("what is returned", kept, None)
            everything = np.zeros(shape)
            ask("fill", f"{list(shape)}, sliced=False")
            checkpoint.fill(p, everything, whole, sliced=False)
            ask.right("all of it", everything, whole)
        ask_slots(ask)


def ask_slots(ask):
    """Before the first step and after it, of one that is not trained, and without an optimizer."""
    p, frozen, adam = Parameter(np.ones(3), "w"), Parameter(np.ones(2), "f"), None
    frozen.requires_grad = False
    for stepped in (False, True):
        adam = AdamW([p, frozen], 0.1)
        target = np.arange(2.0)
        adam.target = lambda q, target=target: (target if q is p else q.data, None)
        if stepped:
            adam.state["w"] = np.array([3.0, 4.0]), np.array([5.0, 6.0])
        m, v = adam.state.get("w", (np.zeros(2), np.zeros(2)))
        ask("slots", "w " + ("after a step" if stepped else "before the first step"))
        found = checkpoint.slots(p, adam)
        ask.right("names", [name for name, _ in found], ["w", "w.m", "w.v"])
        ask.right("pieces", [x for _, x in found], [target, m, v])
        ask.right("the target itself", found[0][1] is target, True)
        ask("slots", "a parameter that is not trained")
        ask.right("names", [name for name, _ in checkpoint.slots(frozen, adam)], ["f"])
    ask("slots", "w, without an optimizer")
    ask.right("all", checkpoint.slots(p), [("w", p.data)])
    ask("slots", "w, with moments of another kind")
    named = SimpleNamespace(moment_names=("sum",), state={}, target=lambda p: (p.data, None))
    ask.right("names", [name for name, _ in checkpoint.slots(p, named)], ["w", "w.sum"])
