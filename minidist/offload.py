"""Offload: keep what only the optimizer's step needs somewhere else, and let it pass by in chunks.

    elsewhere    [ chunk 0 | chunk 1 | chunk 2 | chunk 3 | ...      state of all parameters, in a
                      ^ put     | get     ^         |                file, or in host memory
    two buffers     [ A ]     [ B ]     [ A ]     [ B ]             all that is here at a time
    update            0         1         2         3     -> time

While chunk 1 is updated in buffer B, a thread puts chunk 0 back from A, and then gets chunk 2 into
A.  It does one thing after the other, so nothing is read into a buffer that is not yet put back.

With ZeRO's stage 3 parameters are elsewhere, too: before a part of the model computes, the thread
that gathers it reads this rank's pieces, while the part before computes; the step updates them in
chunks with their state, and puts them back.

A File has no name in its directory: the system removes it when the run ends, however it ends.

Price: bytes moved per step, see cost.offload.  Gain: two chunks in the place of the state.  The
numbers are the same bit for bit.  Only for optimizers that treat each element alone: SGD, AdamW.
Lesson: mpirun -n 4 python -m lessons.offload
Paper:  Ren et al. 2021, "ZeRO-Offload"; Rajbhandari et al. 2021, "ZeRO-Infinity" (NVMe)
"""
import errno
import mmap
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from minidist import BadInput
from minidist.mesh import notes
from minidist.ranks.link import sleep_until

CHUNK = 1 << 20                 # bytes of each array in a chunk: AdamW's two buffers are 4 MB
ALIGN = 64                      # so that a chunk begins between two numbers of any dtype


def attach(optimizer, model, make_tier, comm=None, chunk=CHUNK):
    """Let the state of an optimizer, and stage 3's parameters, lie elsewhere.  Collective over comm

    make_tier(bytes) -> Host or File.  After what else changes the optimizer, such as zero.attach.
    -> the optimizer, whose `offload` is the Offload"""
    error = None
    try:
        offload = Offload(optimizer, getattr(model, "pieces", {}), make_tier, chunk)
    except BadInput as refused:
        error = str(refused)
    errors = [e for e in (notes(error, comm) if comm else [error]) if e]
    if errors:                                              # on some ranks, or on all
        raise BadInput(errors[0])
    optimizer.offload = offload.install(model)
    return optimizer


# ------------------------------------------------------------------------ elsewhere

class Host:
    """So many bytes of memory behind a link: what a CPU's memory is to a GPU.

    array: all of it, for whoever looks on from outside of a step.  link: a ranks.link.Link, over
    which what is moved takes its time.  got, given: bytes moved from here, and to here"""

    def __init__(self, nbytes, link=None):
        self.link, self.got, self.given = link, 0, 0
        self.array = np.frombuffer(self.memory(nbytes), np.uint8)

    def memory(self, nbytes):
        return mmap.mmap(-1, nbytes)                        # which the ledger tells from our own

    def get(self, at, into):
        """Read what begins at byte `at`, until `into` is full."""
        self.over_the_link(self.read, at, into)
        self.got += into.nbytes

    def put(self, at, data):
        """Write data from byte `at` on."""
        self.over_the_link(self.write, at, data)
        self.given += data.nbytes

    def over_the_link(self, move, at, data):
        """Read or write in no less than the link's time."""
        free = self.link.depart(data.nbytes)[1] if self.link else 0
        move(at, data.view(np.uint8))
        sleep_until(free)

    def read(self, at, into):
        into[...] = self.array[at:at + into.size]

    def write(self, at, data):
        self.array[at:at + data.size] = data

    def close(self):
        """Memory goes when nobody looks at it any more."""


class File(Host):
    """So many bytes of a file without a name in a directory: the NVMe tier.

    Moved by calls, whose failure is an error; that of a mapping, such as `array`, is a signal."""

    def __init__(self, nbytes, folder, link=None):
        self.folder, self.nbytes = folder, nbytes
        super().__init__(nbytes, link)

    def memory(self, nbytes):
        """Make the file, and fill it with zeros now: a disk that is full refuses them here."""
        try:
            self.file = tempfile.TemporaryFile(dir=self.folder, buffering=0)
        except OSError as error:
            self.refuse(error)
        for at in range(0, nbytes, CHUNK):
            self.write(at, np.zeros(min(CHUNK, nbytes - at), np.uint8))
        return mmap.mmap(self.file.fileno(), nbytes)

    def read(self, at, into):
        self.move(os.preadv, at, into)

    def write(self, at, data):
        self.move(os.pwritev, at, data)

    def move(self, call, at, data):
        """Repeat a read or write until all of data has moved."""
        try:
            while data.size:
                moved = call(self.file.fileno(), [data], at)
                if moved == 0:
                    raise OSError(errno.EIO, "the file has been cut short")
                data, at = data[moved:], at + moved
        except OSError as error:
            self.refuse(error)

    def refuse(self, error):
        raise BadInput(f"--offload {self.folder}: {error.strerror}; this rank keeps "
                       f"{self.nbytes:,} bytes there: name a directory that can hold them"
                       ) from None

    def close(self):
        self.file.close()


class Piece:
    """A parameter's piece that lies elsewhere: read when NumPy asks for its numbers."""

    def __init__(self, tier, at, like):
        self.tier, self.at, self.like, self.size = tier, at, like, like.size

    def __array__(self, dtype=None, copy=None):
        numbers = np.empty_like(self.like)
        self.tier.get(self.at, numbers)
        return numbers


# ------------------------------------------------------------------------ passing by

def cut(sizes, most):
    """Cut arrays of these sizes, laid end to end, into chunks of `most`; the last may be smaller.

    -> for each chunk [(which array, start, stop in it), ...], nothing empty among them"""
    chunks, room = [], 0
    for i, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                chunks.append([])
                room = most
            stop = min(size, start + room)
            chunks[-1].append((i, start, stop))
            room -= stop - start
            start = stop
    return chunks


def pass_by(chunks, buffers, get, put, submit):
    """Yield (chunk, buffer) one after the other, its neighbours on their way meanwhile.

    submit(fn, chunk, buffer) -> a future: get or put, in the background, in the order submitted.
    There are two buffers.  At the end nothing is on its way."""
    going, coming = [], submit(get, chunks[0], buffers[0]) if chunks else None
    for i, chunk in enumerate(chunks):
        mine, other = buffers[i % 2], buffers[1 - i % 2]
        coming.result()
        if i + 1 < len(chunks):                             # after the put from this buffer
            coming = submit(get, chunks[i + 1], other)
        yield chunk, mine
        going.append(submit(put, chunk, mine))
    for done in going:
        done.result()


class State(dict):
    """An optimizer's state that lies elsewhere: to set an entry is to write it there."""

    def __init__(self, views):
        super().__init__()
        self.views = views

    def __setitem__(self, name, arrays):
        for view, x in zip(self.views[name], arrays, strict=True):
            view[...] = x
        self.there(name)

    def there(self, name):
        """Show what lies there already."""
        super().__setitem__(name, self.views[name])


class Offload:
    """Let an optimizer's state pass by in its step; and parameters, if `pieces` names any.

    Elsewhere each slot has its region: slot 0 the parameters (if any), then each of the moments."""

    def __init__(self, optimizer, pieces, make_tier, chunk=CHUNK):
        self.optimizer, self.both = optimizer, bool(pieces)
        self.slots = self.both + len(optimizer.moment_names)
        if not self.slots:
            raise BadInput("the optimizer keeps no state that --offload could move; use "
                           "--optimizer adamw, or leave out --offload")
        for p in optimizer.params:
            p.data = np.array(p.data, order="C", copy=None)         # so that flat ones are views
        targets = {p: optimizer.target(p)[0] for p in optimizer.params}
        self.params = sorted(targets, key=lambda p: -targets[p].itemsize)    # aligned, without gaps
        sizes = [targets[p].nbytes for p in self.params]
        self.chunk, self.region = up(chunk), up(sum(sizes))
        self.chunks, self.nbytes = cut(sizes, self.chunk), self.slots * sum(sizes)
        self.starts = dict(zip(self.params, np.cumsum([0, *sizes]).tolist()))
        self.tier = make_tier(self.slots * self.region)
        self.buffers = np.empty((2, self.slots, min(self.chunk, self.region)), np.uint8)
        self.thread, self.complete, self.here = ThreadPoolExecutor(1), True, None
        self.views = {p.name: self.look(p, targets[p]) for p in self.params}

    def look(self, p, like):
        """Find the arrays of a parameter, where they lie.  -> one for each slot, as its target"""
        starts = (slot * self.region + self.starts[p] for slot in range(self.slots))
        return tuple(self.tier.array[at:at + like.nbytes].view(like.dtype).reshape(like.shape)
                     for at in starts)

    def install(self, model):
        """Take the optimizer's seams, and move to the tier what lies there from now on."""
        state = State({name: views[self.both:] for name, views in self.views.items()})
        for name, arrays in self.optimizer.state.items():
            state[name] = arrays
        self.optimizer.state = state
        self.optimizer.targets, self.optimizer.moments = self.targets, self.moments
        if self.both:
            model.sources = dict(model.pieces)
            for p in self.params:
                self.part_with(p, model)
        return self

    def part_with(self, p, model):
        """Move a parameter's piece to the tier; whoever gathers it reads it there."""
        view = self.views[p.name][0]
        view[...] = p.data
        p.data = model.pieces[p.name] = view
        model.sources[p.name] = Piece(self.tier, self.starts[p], view)

    def account(self):
        """Say how many bytes of this rank lie elsewhere, and how many have moved."""
        return {"elsewhere": self.nbytes, "read": self.tier.got, "written": self.tier.given}

    def close(self):
        """Give thread and file back; what lies there can still be looked at."""
        self.thread.shutdown()
        self.tier.close()

    # ---- one step

    def targets(self):
        """Yield (parameter, array, gradient) of every piece, each while its chunk is here.

        A chunk in which nothing has a gradient stays where it is."""
        if not self.complete:
            raise RuntimeError("an earlier step has ended halfway: some parameters are updated, "
                               "others are not; start again from what was saved before")
        found = {p: self.optimizer.target(p) for p in self.params}
        found = {p: (w, g) for p, (w, g) in found.items() if g is not None}
        chunks = [i for i, chunk in enumerate(self.chunks)
                  if any(self.params[k] in found for k, _, _ in chunk)]
        get, put = (partial(self.move, call) for call in (self.tier.get, self.tier.put))
        self.complete = False
        for i, buffer in pass_by(chunks, self.buffers, get, put, self.thread.submit):
            yield from self.pieces(i, buffer, found)
        for p in found:
            self.optimizer.state.there(p.name)
        self.complete, self.here = True, None

    def moments(self, p, w):
        """Return the state of a piece: in a step what has come by; outside of one, where it lies.

        The latter is how a checkpoint is written and read: zeros, if there is no state yet."""
        state = self.optimizer.state
        if self.here is None and p.name not in state:
            state[p.name] = [0] * len(state.views[p.name])
        return state[p.name] if self.here is None else self.here

    def pieces(self, i, buffer, found):
        """Yield what is updated of chunk i.  found: {parameter: (whole target, gradient)}"""
        for k, start, stop in self.chunks[i]:
            p = self.params[k]
            if p not in found:
                continue
            at = self.starts[p] + start - i * self.chunk
            w, g = (x.reshape(-1)[start // x.itemsize:stop // x.itemsize] for x in found[p])
            rows = buffer[:, at:at + stop - start].view(w.dtype)
            self.here = tuple(rows[self.both:])
            if p.name not in self.optimizer.state:          # its first update
                rows[self.both:] = 0
            yield p, rows[0] if self.both else w, g

    def move(self, call, i, buffer):
        """Get or put chunk i: its part of each slot."""
        size = sum(stop - start for _, start, stop in self.chunks[i])
        for slot, row in enumerate(buffer):
            call(slot * self.region + i * self.chunk, row[:size])


def up(nbytes):
    """Round up, so that what comes next begins between two numbers of any dtype."""
    return -(-nbytes // ALIGN) * ALIGN
