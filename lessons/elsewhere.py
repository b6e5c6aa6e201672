"""What the lesson on offload measures and counts: two speeds, chunks that pass by, bytes."""
import tempfile
import time
from functools import partial

import numpy as np

from lessons import setting
from minidist import offload, parallel, step, zero
from minidist.mesh import DeviceMesh

CHUNK, ROWS = 32768, 6


class Thread:
    """Do what is submitted in order, at once or only when somebody waits for it."""

    def __init__(self, at_once):
        self.todo, self.at_once = [], at_once

    def submit(self, fn, *args):
        job = Job(self, fn, args)
        self.todo.append(job)
        if self.at_once:
            self.todo.pop().run()
        return job


class Job:
    def __init__(self, thread, fn, args):
        self.thread, self.fn, self.args, self.error = thread, fn, args, None

    def result(self):
        while self in self.thread.todo:
            self.thread.todo.pop(0).run()
        if self.error:
            raise self.error

    def run(self):
        try:
            self.fn(*self.args)
        except OSError as error:
            self.error = error


def followed(count, at_once=False, full=None):
    """Let `count` chunks, each one number, pass by; 100 is added to each.  full: cannot be put back

    -> [(chunk, its buffer, what that holds, what the other holds, jobs on their way)], the end"""
    there, buffers, thread = list(range(count)), [[None], [None]], Thread(at_once)

    def get(i, buffer):
        buffer[0] = there[i]

    def put(i, buffer):
        if i == full:
            raise OSError("the disk is full")
        there[i] = buffer[0]

    seen = []
    for i, buffer in offload.pass_by(list(range(count)), buffers, get, put, thread.submit):
        which = 0 if buffer is buffers[0] else 1
        seen.append((i, which, buffer[0], buffers[1 - which][0],
                     [f"{job.fn.__name__} {job.args[0]}" for job in thread.todo]))
        buffer[0] = 100 + i if buffer[0] is None else 100 + buffer[0]
        if len(seen) > 2 * count:
            break
    return seen, there


def faults(at_once):
    """Count chunks that were not here, or not back at the end, over runs of 0 to 5 chunks."""
    wrong = 0
    for count in range(6):
        seen, there = followed(count, at_once)
        wrong += abs(len(seen) - count) + sum(held != i for i, _, held, _, _ in seen)
        wrong += sum(x != 100 + i for i, x in enumerate(there))
    return wrong


def untold():
    """Count chunks that could not be put back, of which nobody hears."""
    heard = 0
    for i in range(5):
        try:
            followed(5, full=i)
        except OSError:
            heard += 1
    return 5 - heard


def idle():
    """Count updates beside which a neighbour should travel, and does not."""
    seen, _ = followed(5)
    wanted = [[name for name, there in ((f"put {i - 1}", i > 0), (f"get {i + 1}", i < 4)) if there]
              for i in range(5)]
    return sum(sorted(jobs) != sorted(want) for (*_, jobs), want in zip(seen, wanted))


def miscut():
    """Count lists of sizes that are not cut into full chunks, in order, each number once."""
    wrong = 0
    for sizes in [], [5], [0, 7], [2, 3], [6, 0, 1, 11], [3, 3, 3, 3]:
        for most in (1, 3, 6):
            chunks = offload.cut(sizes, most)
            numbers = [(i, x) for chunk in chunks for i, a, b in chunk for x in range(a, b)]
            lengths = [sum(b - a for _, a, b in chunk) for chunk in chunks]
            empty = any(a == b for chunk in chunks for _, a, b in chunk)
            full = [most] * (len(lengths) - 1)
            wrong += (numbers != [(i, x) for i, n in enumerate(sizes) for x in range(n)] or empty
                      or lengths[:-1] != full or max(lengths, default=0) > most
                      or sum(map(len, chunks)) > len(sizes) + len(chunks))
    return wrong


def trained(comm, stage=0, make=setting.ADAMW, tier=offload.Host, steps=2, passes=1):
    """Train on all ranks, with ZeRO's stage or plain dp; tier None: all of it here.

    -> model, optimizer, what has moved before the last step"""
    mesh = DeviceMesh(comm, dp=comm.size)
    model = setting.shallow(dropout=0.1)
    model = zero.parallelize(model, mesh["dp"], stage) if stage else setting.cut(model, mesh, "dp")
    optimizer = parallel.equip(make(model.parameters()), model)
    if tier:
        offload.attach(optimizer, model, tier, comm, CHUNK)
    for t in range(steps):
        before = optimizer.offload.account() if tier else None
        step.train_step(model, setting.words(ROWS, t), optimizer, mesh, passes, 0.5)
    return model, optimizer, before


def apart(comm, stage, make, tier):
    """The largest difference between parameters and state of a run with a tier and one without."""
    ours, theirs = (trained(comm, stage, make, t)[:2] for t in (tier, None))
    arrays = [[x for p in model.parameters() for x in (p.data, *optimizer.state[p.name])]
              for model, optimizer in (ours, theirs)]
    return max(float(np.abs(a - b).max(initial=0)) for a, b in zip(*arrays, strict=True))


def moved(comm, stage, passes=1):
    """-> bytes elsewhere, bytes read and written in a step, bytes of the buffers"""
    _, optimizer, before = trained(comm, stage, passes=passes)
    now = optimizer.offload.account()
    return (now["elsewhere"], now["read"] - before["read"], now["written"] - before["written"],
            optimizer.offload.buffers.nbytes)


def file():
    return partial(offload.File, folder=tempfile.gettempdir())


def speeds(nbytes=32 << 20):
    """Bytes per second here: of a copy in memory, of reading a file (which memory may hold)."""
    tiers, into = (offload.Host(nbytes), file()(nbytes)), np.empty(nbytes, np.uint8)
    return [nbytes / min(timed(tier.get, into) for _ in range(3)) for tier in tiers]


def timed(get, into):
    began = time.perf_counter()
    get(0, into)
    return time.perf_counter() - began
