"""CHECKPOINTS      A job dies in the middle of a save. What loads, and on which ranks?

  lifts   nothing     a training survives its machines, and may go on on others
  costs   disk        12 bytes per parameter each time, and the time to write them
  code    minidist/checkpoint.py, minidist/storage.py
  run     mpirun -n 4 python -m lessons.checkpoint      or: python -m lessons.checkpoint -n 4
"""
import shutil

import numpy as np

from lessons import disk, kit
from lessons.halves import HALF, apart, first_half, forgetful, other, second_half, small
from minidist import checkpoint, storage

EXERCISE = [checkpoint.slots, checkpoint.fill, storage.commit]
QKV = "blocks.0.attn.qkv.weight"


def what_a_step_needs(lesson):
    """What does the next step depend on?

    Batches and dropout are made from (seed, step), gradients by the step. What is left: parameters,
    the optimizer's moments, and the numbers it counts by."""
    lesson.predict("7.5 billion parameters in float32, with AdamW: one checkpoint", 90, "GB",
                   why="a parameter, m and v: 12 bytes each",
                   mistakes={120: "gradients are not needed", 30: "the moments are missing"})
    found = lesson.share(lambda: {name: forgetful(*what) for name, what in {
        "nothing": (), "m and v": ("state",), "t, so also the rate": ("t",),
        "the step: the same data again": ("step",)}.items()})
    steps = [HALF, HALF + 1, 2 * HALF - 1]
    lesson.table(["forgotten", *(f"loss at step {t}" for t in steps)],
                 [[name, *(f"{losses[t - HALF]:.4f}" for t in steps)]
                  for name, losses in found.items()])
    lesson.say("No run crashes, no loss is absurd. Who does not compare does not notice.")


def what_is_meant(lesson):
    """Save what is meant, not how it lies

    Each tensor is joined from its pieces, one at a time, and written once, by one of the ranks that
    hold it. Whoever reads lays it out anew. First half with ZeRO on dp, second half elsewhere:"""
    with disk.folder(lesson) as folder:
        straight, found = first_half(lesson.comm, folder)
        there = second_half(lesson.comm, folder, other(lesson.comm))
    entry = found.index["tensors"][QKV]
    lesson.rows([f"m of {QKV} in the first half", "in the second"],
                [held(run) for run in (straight, there)])
    lesson.say(f"On disk: {QKV}.m.npy, {entry['shape']}, {entry['bytes']} bytes.")
    lesson.table(["step", straight.mesh.describe(), there.mesh.describe()],
                 [[t, f"{straight.losses[t]:.12f}", f"{there.losses[t - HALF]:.12f}"]
                  for t in range(HALF, 2 * HALF)])
    lesson.figure(curves, straight.losses, there.losses, there.mesh.describe())


def the_commit(lesson):
    """A rename is the commit

    Files take minutes to write, so they go into step_2.part, which nobody reads. A rename is one
    operation of the file system: before it there is no step_2, after it there is all of it.
    Then `latest` is replaced, also by a rename. A job killed before each operation in turn:"""
    rows, _ = lesson.share(lambda: disk.kills(storage.commit))
    lesson.table(["killed before", "loads", "not in order"], [
        [operation, f"step_{value}", "; ".join(wrong) or "-"] for operation, value, wrong in rows
        if operation != "sync"])
    lesson.say("""
        Between the two renames step_2 is there and latest names step_1: either is a right state.
        What is renamed is synced before (rows left out): it outlives a power failure, too.""")


def how_often(lesson):
    """How often?

    A save stops training for C; a machine fails once in M, and T/2 is lost, for saves T apart:
    C/T + T/(2M) of all time. Its minimum, Young's, is at T = sqrt(2 C M)."""
    lesson.predict("A save takes 1 minute, and a failure comes once a day. The best interval:",
                   53.7, "minutes", why="sqrt(2 x 1440)", mistakes={38: "the 2 under the root"})
    lesson.table(["minutes between saves", "a failure a day", "one every 3 hours"], [
        [T, *(f"{1 / T + T / (2 * M):.1%}" for M in (1440, 180))] for T in (5, 20, 200)])


def prove(lesson):
    """Is it the same training, whatever happens?"""
    with disk.folder(lesson) as folder:
        straight, saved = first_half(lesson.comm, folder, steps=1)
        again = second_half(lesson.comm, folder, {}, steps=1)
        there = second_half(lesson.comm, folder, other(lesson.comm), steps=1)
    lesson.check("on the same ranks, bit for bit", apart(again, straight))
    lesson.check("on another mesh", apart(there, straight), 1e-12)
    found = lesson.share(lambda: disk.trials(storage.commit))
    lesson.check("killed at any moment: the old or the new one loads", found["lost"])
    lesson.check("what is visible is whole; latest names it", found["untrue"])
    lesson.check("what is renamed was synced, and nothing is left over", found["unsynced"])
    lesson.check("a flipped byte in each file is noticed", found["unnoticed"])
    disk.questions(lesson)
    params, p = small().parameters(), lesson.comm.size
    entries = saved.index["tensors"].values()
    padded = sum(p * -(-x.size // p) for x in params)
    lesson.ledger(("files, of f parameters", "3 f", None, len(entries)),
                  ("bytes, 128 of each file its head", "24 P + 128 (3 f)", None,
                   sum(entry["bytes"] for entry in entries)),
                  ("sent to join ZeRO's pieces, all ranks", "(p-1) 24 Q", None,
                   sum(lesson.collect(straight.sent))),
                  p=p, f=len(params), P=sum(x.size for x in params), Q=padded)


@kit.breaks(checkpoint, "slots")
def moments_dropped(p, optimizer=None):
    """The optimizer's state is not saved; after the load its moments begin at zero.

    The first steps are too large or too small, then the curve looks as before (TrenTorch #187)."""
    return moments_dropped.original(p, optimizer)[:1]


@kit.breaks(checkpoint, "set_counters")
def count_from_zero(optimizer, counters):
    """The step count is not restored: the rate warms up again, and Adam corrects its bias again.

    All tensors are right, bit for bit; only the next step is not."""


@kit.breaks(checkpoint, "fill", first="if")
def interleaved(p, piece, x, sliced=True):
    """For another tp, rows of qkv are laid as [q q ..  k k ..  v v ..]; they are [q k v  q k v ..].

    All shapes are right, and the loss jumps (Megatron-LM #4841, nnsight #719)."""
    if ".qkv." in p.name and "tp" in p.placements:
        e = 2
        x = np.array(x).reshape(3, -1, e, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
    interleaved.original(p, piece, x, sliced)


@kit.breaks(storage, "commit")
def latest_first(target, index):
    """latest is written before the rename.

    A kill between the two leaves it with the name of a directory that is not there."""
    storage.write_json(target.parent / storage.LATEST, {"checkpoint": target.name})
    latest_first.original(target, index)


@kit.breaks(storage, "commit")
def in_place(target, index):
    """The old directory is removed first, then the new one renamed.

    Almost always right. Killed in between, there is neither, if that was the only one."""
    shutil.rmtree(target, ignore_errors=True)
    in_place.original(target, index)


@kit.breaks(storage, "read")
def unread(path, entry):
    """Checksums of tensors are written, and never compared.

    A disk that returns another byte, or half a file, changes the training in silence."""
    return unread.original(path, {})


def held(run):
    """The shape of my piece of the first moment of qkv, if I have one."""
    mine = [p for p in run.model.parameters() if p.name == QKV]
    return str(list(run.optimizer.state[QKV][0].shape)) if mine else "nothing"


def curves(figure, straight, there, name):
    axes = figure.subplots()
    axes.plot(straight, "-", label="never stopped")
    axes.plot(range(HALF, 2 * HALF), there, "o", label=f"went on on {name}")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()


TAKEAWAY = "A checkpoint is everything the next step depends on, and a rename makes it true."
FIELD = ("torch.distributed.checkpoint (commits by renaming .metadata); Megatron "
         "dist_checkpointing; DeepSpeed universal checkpoints")
TRY = ["a save that only copies memory and writes while training goes on: what must it not share?"]
SCREENS = [what_a_step_needs, what_is_meant, the_commit, how_often, prove, count_from_zero]

if __name__ == "__main__":
    kit.run(SCREENS)
