"""Storage: a directory of checkpoints in which each one is whole, or not there.

    out/step_200.part/    being written; what a killed run leaves of it is seen by nobody
    out/step_200/         committed, by a rename
    out/step_200.old/     replaced by a later step_200, not removed yet
    out/latest            which one to read first

A rename is one operation of the file system: whoever looks sees the directory complete, or not.
What is renamed has been synced, so that it is also true after a power failure. Every file has a
checksum: tensors in the index, the index and `latest` in themselves.

Lesson: mpirun -n 4 python -m lessons.checkpoint
"""
import hashlib
import json
import os
import re
import shutil

import numpy as np

from minidist import BadInput

INDEX, LATEST, PART, OLD = "index.json", "latest", ".part", ".old"
NAME = re.compile(r"step_(\d+)(\.old)?")
FORMAT = 1


class Damaged(Exception):
    """A file that is not as it was written: its path, and what is wrong."""


# ------------------------------------------------------------------------------ one file

class Hashed:
    """A file that takes the checksum of what is written to it."""

    def __init__(self, file):
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()

    def write(self, data):
        self.sha256.update(data)
        self.size += len(data)
        return self.file.write(data)


def write(path, fill):
    """Let fill(file) write a file; the disk has it after sync(path).  -> its size and checksum"""
    try:
        with open(path, "wb") as file:
            hashed = Hashed(file)
            fill(hashed)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return {"bytes": hashed.size, "sha256": hashed.sha256.hexdigest()}


def read(path, entry):
    """Read a file; Damaged unless it has the size and the checksum that `write` returned."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from None
    if len(data) != entry.get("bytes", len(data)):
        raise Damaged(f"{path} has {len(data)} bytes, {entry['bytes']} were written")
    if "sha256" in entry and hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise Damaged(f"{path} is not as it was written")
    return data


def write_tensor(folder, name, x, entries):
    """Write one array, and enter it into an index."""
    entry = write(tensor_file(folder, name), lambda file: np.save(file, x, allow_pickle=False))
    entries[name] = {"shape": list(x.shape), "dtype": x.dtype.name, **entry}


def read_tensor(folder, name):
    """Open one array, of which only what is used will be read; never unpickles."""
    path = tensor_file(folder, name)
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is no array of numbers: {error}") from None


def tensor_file(folder, name):
    return folder / (name + ".npy")


def write_json(path, content):
    write(path, lambda file: file.write(encode(content)))
    sync(path)


def encode(content):
    """Turn a dict into JSON that holds its own checksum.  -> bytes"""
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({"sha256": digest, **content}, indent=1).encode()


def read_json(path):
    """Read what `write_json` wrote; Damaged if any byte of it is another one now."""
    data = read(path, {})
    try:
        content = json.loads(data)
        del content["sha256"]
        same = encode(content) == data
    except (ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise Damaged(f"{path} is not as it was written")
    return content


def sync(path):
    """Wait until the disk has a file, or the names of what is in a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(handle)


# ------------------------------------------------------------------------------ one checkpoint

def prepare(target):
    """Make target.part, empty, and clear away what killed runs have left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob("step_*" + PART):
        shutil.rmtree(left)
    beside(target, PART).mkdir()


def commit(target, index):
    """Add the index to target.part, make it visible as `target`, then say that it is the latest."""
    part, old = beside(target, PART), beside(target, OLD)
    write_json(part / INDEX, {"format": FORMAT, **index})
    sync(part)
    if target.exists():                         # the same step again: it stays until this is here
        remove(old)
        os.rename(target, old)
    os.rename(part, target)
    sync(target.parent)
    draft = target.parent / (LATEST + PART)
    write_json(draft, {"checkpoint": target.name})
    os.replace(draft, target.parent / LATEST)
    sync(target.parent)


def prune(target, keep=None):
    """Remove what `target` has replaced, and all but the newest `keep` checkpoints up to it."""
    remove(beside(target, OLD))
    older = [path for path in committed(target.parent) if number(path) < number(target)]
    for path in older[keep - 1:] if keep else []:
        remove(path)


def remove(path):
    """Remove a checkpoint; half removed, it does not look like one."""
    if path.exists():
        gone = beside(path, PART)
        os.rename(path, gone)
        shutil.rmtree(gone)


def beside(path, suffix):
    return path.with_name(path.name + suffix)


# ------------------------------------------------------------------------------ all of them

def committed(folder):
    """List the checkpoints in a directory, newest first; replaced ones after those that replace."""
    found = [path for path in folder.glob("step_*") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (number(path), path.suffix != OLD), reverse=True)


def number(path):
    return int(NAME.fullmatch(path.name)[1])


def candidates(where):
    """List the checkpoints in a directory in the order to try them.  -> paths, what is wrong

    First what `latest` names. where: may also be one checkpoint."""
    if NAME.fullmatch(where.name) and where.is_dir():
        return [where], []
    found = committed(where)
    try:
        latest = where / read_json(where / LATEST)["checkpoint"]
        wrong = [] if latest in found else [f"{where / LATEST} names {latest.name}, which is gone"]
    except Damaged as error:
        latest, wrong = None, [str(error)] if found else []
    return sorted(found, key=lambda path: path != latest), wrong


def open_index(path):
    """Read the index of a checkpoint; Damaged if it cannot be used."""
    index = read_json(path / INDEX)
    if index.get("format") != FORMAT:
        raise Damaged(f"{path} has format {index.get('format')}, and this program reads {FORMAT}")
    return index
