"""Checkpoint: a training on disk, from which any other layout can go on.

    out/step_200/index.json                  shapes, checksums, counters, what else was noted
        embed.wte.weight.npy                 a global tensor each, stored once, as NumPy stores it
        embed.wte.weight.m.npy   .v.npy      the optimizer's moments of it
    out/latest                               which one to read first

Files hold logical tensors, and nothing of how they lay on ranks: pieces of tp, pp or ZeRO are
joined when written and laid out anew when read, one tensor at a time.

    save   every rank writes and syncs its share into step_200.part    a kill here: nothing is seen
           rename step_200.part -> step_200                            <- the commit
           write latest                                                a kill before: the older one
    find   what latest names, then the others, newest first; the first whose checksums all hold

Files are read without pickle, so a checkpoint from a stranger cannot run code.

Lesson: mpirun -n 4 python -m lessons.checkpoint
"""
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minidist import BadInput, storage
from minidist.mesh import mesh_of, notes
from minidist.placement import join, lay


# ------------------------------------------------------------------------- what there is to save

def slots(p, optimizer=None):
    """List what the next step depends on of a parameter.  -> [(name, my piece)]

    What the optimizer writes of it, from which all else follows, and its moments, zero before the
    first update."""
    piece = optimizer.target(p)[0] if optimizer else p.data
    names = optimizer.moment_names if optimizer and p.requires_grad else ()
    moments = names and optimizer.state.get(p.name) or [np.zeros_like(piece) for _ in names]
    return [(p.name, piece)] + [(f"{p.name}.{name}", x) for name, x in zip(names, moments)]


def tensors(model, optimizer=None):
    """List all that this rank holds and the next step depends on.  -> [(name, parameter, piece)]"""
    return [(name, p, x) for p in model.parameters() for name, x in slots(p, optimizer)]


def fill(p, piece, x, sliced=True):
    """Write my part of the global tensor x into `piece`, in place, without any padding."""
    mine = lay(p, x, sliced)
    piece[...] = mine.reshape(-1)[:piece.size].reshape(piece.shape)


# ------------------------------------------------------------------------------------ save

def save(folder, model, optimizer, mesh=None, step=0, about=None, keep=None):
    """Write folder/step_N.  Collective: every rank calls, with the same step.  -> its path

    about: what else shall be found again, as JSON.  keep: how many checkpoints to leave there, the
    newest; None: all.  Raises BadInput, on all ranks alike, if it cannot be written: then what was
    there before is still there."""
    mesh, target = mesh_of(model, mesh), Path(folder) / f"step_{step}"
    world, mine = mesh.world, tensors(model, optimizer)
    wrong = attempt(storage.prepare, target) if world.rank == 0 else []
    said = speak([str(target), [name for name, _, _ in mine], wrong], world)
    refuse_different([path for path, _, _ in said])
    share = writers([names for _, names, _ in said])
    entries, wrong = write_share(target, mine, [share[name] == world.rank for name, _, _ in mine],
                                 said[0][2])
    everyone = speak([entries, wrong], world)
    if world.rank == 0:
        wrong = [line for _, lines in everyone for line in lines]
        index = {"step": step, "mesh": mesh.describe(), "about": about or {},
                 "counters": {name: getattr(optimizer, name) for name in optimizer.counters},
                 "tensors": {name: entry for found, _ in everyone for name, entry in found.items()}}
        wrong = wrong or attempt(storage.commit, target, index)
        wrong = wrong or attempt(storage.prune, target, keep)
    if wrong := speak(wrong, world)[0]:
        if world.rank == 0:
            shutil.rmtree(storage.beside(target, storage.PART), ignore_errors=True)
        raise BadInput(f"saving {target} has failed: {wrong[0]}")
    return target


def speak(mine, world):
    """Let every rank know what each has to say about this save.  Collective"""
    with world.operation("checkpoint.save"):
        return notes(mine, world)


def refuse_different(paths):
    """Raise ValueError, on all ranks alike, unless they save the same step to the same place."""
    for rank, path in enumerate(paths):
        if path != paths[0]:
            raise ValueError(f"rank 0 saves {paths[0]} and rank {rank} saves {path}: all ranks "
                             "save the same step together")


def writers(held):
    """Share out the writing: each tensor to one of the ranks that hold it.  -> {name: rank}"""
    holders = {}
    for rank, names in enumerate(held):
        for name in names:
            holders.setdefault(name, []).append(rank)
    return {name: ranks[i % len(ranks)] for i, (name, ranks) in enumerate(holders.items())}


def write_share(target, mine, is_mine, wrong):
    """Join every tensor, one at a time, and write those that are mine.  Collective

    wrong: what has gone wrong already; then nothing is written.  -> {name: entry}, what is wrong"""
    part, entries, wrong = storage.beside(target, storage.PART), {}, list(wrong)
    for (name, p, piece), write_it in zip(mine, is_mine):
        x = join(p, piece, sliced=True)
        if write_it and not wrong:
            wrong = attempt(storage.write_tensor, part, name, x, entries)
    for name in entries:                            # not one by one: each has less to wait for
        wrong = wrong or attempt(storage.sync, storage.tensor_file(part, name))
    return entries, wrong


def attempt(do, *args):
    """Call it.  -> what went wrong: no sentence, or one"""
    try:
        do(*args)
    except OSError as error:
        return [f"{error.filename}: {error.strerror}"]
    return []


# ------------------------------------------------------------------------------------ find

@dataclass(frozen=True)
class Found:
    """A checkpoint whose checksums hold, and what was passed over on the way to it."""
    path: Path
    index: dict
    refused: list                                       # a sentence each, with the file's name


def find(where, world):
    """Choose the checkpoint to go on from.  Collective; the same on all ranks  -> Found

    where: a directory of checkpoints, or one of them.  Raises BadInput if there is none."""
    with world.operation("checkpoint.find"):
        order, refused = notes(listed(where) if world.rank == 0 else None, world)[0]
        for path in map(Path, order):
            index, wrong = notes(opened(path) if world.rank == 0 else None, world)[0]
            share = notes(damaged(path, index, world) if index else [], world)
            wrong = wrong or [line for lines in share for line in lines]
            if not wrong:
                return Found(path, index, refused)
            refused.append(wrong[0])
    raise BadInput(f"there is no checkpoint to read in {where}: "
                   f"{'; '.join(refused) or 'no directory in it has a name such as step_100'}")


def listed(where):
    """List the checkpoints to try.  -> paths as text, what is wrong"""
    paths, wrong = storage.candidates(Path(where))
    return [str(path) for path in paths], wrong


def opened(path):
    """Read an index.  -> index or None, what is wrong"""
    try:
        return storage.open_index(path), []
    except storage.Damaged as error:
        return None, [str(error)]


def damaged(path, index, world):
    """Compare my share of the files with their checksums.  -> a sentence for each wrong one"""
    wrong = []
    for name in sorted(index["tensors"])[world.rank::world.size]:
        try:
            storage.read(storage.tensor_file(path, name), index["tensors"][name])
        except storage.Damaged as error:
            wrong.append(str(error))
    return wrong


# ------------------------------------------------------------------------------------ load

def load(found, model, optimizer=None, mesh=None):
    """Fill model and optimizer with what a checkpoint holds, whatever mesh it was saved on.

    Without an optimizer, the parameters alone.  Collective: every rank calls.
    Raises BadInput, on all ranks alike and before anything has changed, unless the checkpoint has
    exactly what they have, in the same shapes and dtypes."""
    mesh, mine = mesh_of(model, mesh), tensors(model, optimizer)
    refuse_mismatch(found, mine, optimizer, mesh.world)
    for p in model.parameters():
        pieces = slots(p, optimizer)
        for name, piece in pieces:
            fill(p, piece, storage.read_tensor(found.path, name), sliced=optimizer is not None)
        p.changed()
        if len(pieces) > 1:
            optimizer.state[p.name] = tuple(x for _, x in pieces[1:])
    if optimizer:
        set_counters(optimizer, found.index["counters"])
        for hook in optimizer.after_step:
            hook()


def set_counters(optimizer, counters):
    """Let an optimizer count on from there."""
    for name, value in counters.items():
        if isinstance(value, list):                         # a tuple with names, as JSON keeps it
            value = type(getattr(optimizer, name))(*value)
        setattr(optimizer, name, value)


def refuse_mismatch(found, mine, optimizer, world):
    """Raise BadInput if the checkpoint lacks something, has more, or has it in another form."""
    here = {}
    for ours in notes({name: [x.dtype.name, list(p.full_shape)]
                       for name, p, x in mine}, world):
        here |= ours
    wrong = list(differences(found.index["tensors"], here))
    if optimizer:
        wrong += [f"{name}, for which there is no place here" for name in found.index["tensors"]
                  if name not in here]
        if (counted := sorted(found.index["counters"])) != sorted(optimizer.counters):
            wrong.append(f"counters {counted}, and here are {sorted(optimizer.counters)}")
    if wrong:
        more = f" ({len(wrong) - 1} more differ)" if len(wrong) > 1 else ""
        raise BadInput(f"{found.path} does not fit: it has {wrong[0]}{more}")


def differences(there, here):
    """Say what the checkpoint does not have as it is needed.  {name: (dtype, shape)}"""
    for name, (dtype, shape) in here.items():
        if name not in there:
            yield f"no {name}"
        elif (there[name]["dtype"], there[name]["shape"]) != (dtype, shape):
            yield (f"{name} as {there[name]['dtype']} {there[name]['shape']}, and here it is "
                   f"{dtype} {shape}")
