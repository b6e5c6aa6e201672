"""Run a lesson's proof here, with one function of the reader's in processes of its own.

The proof, its references, its counts and every comparison stay in this process, which never imports
the reader's file. Where the proof calls the exercise, a stand-in sends the arguments to the process
of that rank and does, with the library of this process, what the reader's function asks for:
messages go through the Comm of this process, which counts them.

    lesson's proof   <->   stand-in, Session   <- pipe ->   lessons/pupil.py   <->   reader's file
    references, counts     objects, messages                a process per rank       arrays, numbers
"""
import functools
import importlib
import sys
import threading
import types
from contextlib import contextmanager

import numpy as np

from lessons import exercises, substitute
from lessons.asked import KEPT, alone, keep
from lessons.proving import Enough
from lessons.session import Failed, Session
from minidist.engine.data import Batch
from minidist.ranks.comm import run_threads

# Where the names come from that any exercise may use, beside its own module's and its stub's.
ROOMS = ("minidist.engine", "minidist.cost", "minidist.collectives", "minidist.mappings",
         "minidist.placement", "minidist.buckets", "minidist.mesh", "minidist.schedules")
NOT = {"minidist.engine.data"}                       # reads files
MORE = 1.25                                          # times the library's bytes, in a whole proof


class Task:
    """One function of a lesson's exercise, in one reader's file.

    file: its name in messages; modules: whose names it may use, beside ROOMS; seconds of computing
    and megabytes for each of its processes."""

    def __init__(self, function, exercise, modules, source, file, seconds, megabytes):
        self.function, self.name, self.source, self.file = function, function.__name__, source, file
        self.owner, self.modules = sys.modules[function.__module__], modules
        self.others = {f.__name__: f for f in exercise if f is not function}
        self.withheld = exercises.withheld(exercise)
        self.seconds, self.megabytes = seconds, megabytes
        self.sessions, self.idle, self.mine = [], [], threading.local()
        self.lock, self.over = threading.Lock(), False

    def session(self):
        """The process of this thread; a thread that has ended leaves its own to the next one."""
        if not hasattr(self.mine, "lease"):
            self.mine.lease = Lease(self)
        return self.mine.lease.session

    def stand_in(self):
        """What the proof calls in the place of the library's function."""
        @functools.wraps(self.function)
        def of_the_reader(*args, **named):
            return self.session()(self.name, args, named)
        del of_the_reader.__wrapped__
        return of_the_reader

    def end(self):
        """Stop all processes, whatever they are doing."""
        with self.lock:
            self.over = True
        for session in self.sessions:
            session.end()

    def look_up(self, module, name):
        """What a name of the library means.  Raises ImportError where it is not at hand"""
        inner, found = f"{module}.{name}", None
        if module == "minidist" or self.open(module):
            found = getattr(importlib.import_module(module), name, None)
        if isinstance(found, types.ModuleType) and self.open(inner):
            raise AttributeError(name)                # the import system finds it by itself
        if found is None or isinstance(found, types.ModuleType) or name.startswith("__"):
            raise ImportError(f"{inner} is not at hand in this exercise")
        if any(found is own for own in (getattr(self.owner, self.name), *self.withheld)):
            raise ImportError(f"{inner} is the exercise itself")
        if callable(found) and not getattr(found, "__module__", "").startswith("minidist"):
            raise ImportError(f"{inner} is not minidist's own")
        return alone(found)

    def open(self, module):
        return module in self.modules or module.startswith(ROOMS) and module not in NOT


class Lease:
    """A thread's hold on a process, which the next thread may have."""

    def __init__(self, task):
        self.task, self.session = task, None
        with task.lock:
            if task.over:
                raise Failed("the trial has ended")
            if task.idle:
                self.session = task.idle.pop()
        if self.session is None:
            self.session = Session(task)
            with task.lock:
                task.sessions.append(self.session)
            self.session.load()

    def __del__(self):
        if self.session is not None and not self.session.dead:
            self.task.idle.append(self.session)


def trial(lesson, ranks, seed, task=None):
    """Run the proof on thread ranks, with the task's function in place, or the library's own.

    -> Outcome, bytes that the ranks have sent in all of it"""
    outcome, sent = substitute.Outcome(), [0] * ranks
    replaced = [(task.owner, task.name, task.stand_in())] if task else []
    with substitute.patched(*replaced), seeded(seed), batches_kept():
        try:
            run_threads(ranks, prove, lesson, outcome, sent, task, sync=True,
                        timeout=substitute.TIMEOUT)
        except Enough:
            pass
        except Failed as error:
            outcome.error = str(error)
        except Exception as error:                   # noqa: BLE001  (a deadlock, say)
            outcome.error = substitute.describe(error)
    return outcome, sum(sent)


def prove(comm, lesson, outcome, sent, task):
    """Run the proof on one rank; rank 0 keeps what was checked."""
    inner = lesson.quietly(comm)
    inner.hasty = True
    if comm.rank == 0:
        outcome.checks, outcome.ledger = inner.checks, inner.counts
    try:
        if task:
            task.session()
        with comm.counting() as counted:
            lesson.script.prove(inner)
    except BaseException:
        if task:
            task.end()                               # nobody waits for a process any more
        raise
    sent[comm.rank] = sum(count.bytes for group, count in counted.by_group.items()
                          if group != "kit")         # what the lesson itself says


@contextmanager
def seeded(seed):
    """Let every generator that is made from a fixed seed depend on this one as well."""
    original = np.random.default_rng

    def mixed(given=None):
        fixed = isinstance(given, (int, np.integer, list, tuple))
        return original([seed, *np.atleast_1d(given).tolist()] if fixed else given)

    np.random.default_rng = mixed
    try:
        yield
    finally:
        np.random.default_rng = original


@contextmanager
def batches_kept():
    """Let no process write into a batch: the reference is trained on the same one."""
    original = Batch.__init__

    def kept(self, *args, **named):
        original(self, *args, **named)
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                keep(array)

    Batch.__init__ = kept
    try:
        yield
    finally:
        Batch.__init__ = original
        KEPT.clear()
