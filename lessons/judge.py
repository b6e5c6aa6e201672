"""Run a lesson's proof here, and one function of the reader's in processes of its own.

The proof, its references, its counts and every comparison stay in this process, which never imports
the reader's file. Where the proof calls the exercise, a stand-in sends the arguments to the process
of that rank (lessons/pupil.py) and does, with the library of this process, what the reader's
function asks for: messages go through the Comm of this process, which counts them.

What a process may ask for is listed below: public attributes and methods of the library's objects,
and functions of the modules that its stub imports from. It never gets a module, a function's
inside, or a way to write into a Comm.
"""
import functools
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from pathlib import Path

import numpy as np

from lessons import mirrors
from minidist import THREAD_VARIABLES
from minidist.ranks.comm import Comm
from minidist.ranks.stream import Stream, Work
from minidist.ranks.threads import Stopped

PUPIL = Path(__file__).with_name("pupil.py")
DEEPEST = 50                                         # calls of the exercise inside one another

ROOMS = ("minidist.engine", "minidist.cost", "minidist.collectives", "minidist.mappings",
         "minidist.placement", "minidist.buckets", "minidist.mesh", "minidist.schedules")
NOT = {"minidist.engine.data"}
OF_COMM = set("rank size name axes send recv sendrecv shift isend irecv exchange barrier split stream "
              "operation label scratch closed".split())
OF_STREAM = {"submit", "comm", "closed", "wait", "result"}
OPAQUE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
          types.GeneratorType, types.FrameType, types.CodeType, functools.partial)


class Failed(Exception):
    """The reader's function did not do its work: what the record says."""


class Cheated(Failed):
    """It did what no exercise needs."""


def failed_as(name, text):
    """The error of the reader's function, as one that a proof may expect: a ValueError, say."""
    kind = getattr(__import__("builtins"), name, None)
    fits = isinstance(kind, type) and issubclass(kind, Exception)
    return type(name, (Failed, kind) if fits else (Failed,), {})(text)


class Session(mirrors.Mirrors):
    """The process of one rank, and the conversation with it."""

    def __init__(self, task):
        super().__init__(1)
        self.task, self.objects, self.dropped = task, {}, []
        self.stack, self.busy, self.turn = [], False, threading.Condition()
        self.folder = tempfile.mkdtemp(prefix="minidist-grade-")
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(PUPIL), str(theirs.fileno()),
                 str(task.seconds), str(task.megabytes)],
                cwd=self.folder, pass_fds=[theirs.fileno()], start_new_session=True,
                env=dict.fromkeys(THREAD_VARIABLES, "1"), stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=None)
        self.pipe, self.dead = ours, ""
        self.deadline = time.monotonic() + 10 * task.seconds
        self.line = ""

    def load(self):
        self.converse("load", self.task.source, self.task.file, self.task.others)

    def __call__(self, target, args, named):
        """Call one of the reader's functions: the exercise by its name, others by their number."""
        if len(self.stack) > DEEPEST:
            raise Failed(f"{self.task.name} calls itself through the library")
        return self.converse("call", target, args, named)

    def converse(self, *request):
        me = object()
        self.take_turn(lambda: True)
        self.stack.append(me)
        try:
            self.send(*request)
            while True:
                (kind, *message), head = self.receive()
                if kind == "ask":
                    self.pass_turn()
                    answer = self.answer(*message)
                    self.take_turn(lambda: self.stack[-1] is me)
                    self.send(*answer)
                else:
                    return self.ended(kind, *message)
        finally:
            self.stack.remove(me)
            if not self.stack:
                self.forget()
            self.pass_turn()

    def take_turn(self, fits):
        """Wait until the process waits too, and for me: two threads of a rank may talk to it."""
        with self.turn:
            self.turn.wait_for(lambda: self.dead or not self.busy and fits())
            self.busy = True

    def pass_turn(self):
        with self.turn:
            self.busy = False
            self.turn.notify_all()

    def ended(self, kind, *message):
        if kind == "return":
            return message[0]
        if kind != "raise":
            raise self.end(Cheated(f"broke the protocol: {str(kind)[:20]!r}"))
        name, text, where = map(str, message)
        if name == "NotImplementedError":
            raise failed_as(name, f"{where or self.task.file}: not written yet")
        said = text.startswith(self.task.file) or not where
        raise failed_as(name, text if said else f"{where}: {name}: {text}")

    # ---- the pipe

    def send(self, *message):
        if self.dead:
            raise Failed(self.dead)
        dropped, self.dropped = self.dropped, []
        try:
            self.pipe.sendall(self.pack(*message, dropped=dropped))
        except OSError:
            raise self.end(Failed(self.obituary())) from None

    def receive(self):
        try:
            message, head = self.unpack(*mirrors.read(self.recv))
            self.line = str(head.get("line", ""))
            for number, times in head.get("dropped", ()):
                self.drop(number, times)
            if refused := head.get("refused"):
                raise self.end(Cheated(f"{refused[0]}: an exercise needs no such thing"))
            return message, head
        except (mirrors.Torn, AttributeError, TypeError, ValueError) as error:
            raise self.end(Cheated(f"broke the protocol: {error}")) from None
        except TimeoutError:
            raise self.end(Failed(f"{self.line or self.task.file}: no answer within "
                                  f"{10 * self.task.seconds} s")) from None
        except (EOFError, OSError):
            raise self.end(Failed(self.obituary())) from None

    def recv(self, size):
        self.pipe.settimeout(max(0.01, self.deadline - time.monotonic()))
        return self.pipe.recv(size)

    def obituary(self):
        """How the process ended."""
        try:
            status = self.process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its pipe to the grader"
        if status == -signal.SIGXCPU or status == -signal.SIGKILL:
            return f"was ended: more than {self.task.seconds} s of computing, or out of memory"
        if status < 0:
            return f"its process was ended by {signal.Signals(-status).name}"
        return f"its process left before it answered (exit status {status})"

    def end(self, error=None):
        """Stop the process and what it started.  -> error"""
        self.dead = self.dead or str(error or "the trial has ended")
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self.process.wait()
        self.pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        with self.turn:
            self.turn.notify_all()
        return error

    # ---- what the process asks for

    def answer(self, what, *request):
        """Do what is asked.  -> ("reply", value) or ("error", name, text)"""
        try:
            return "reply", getattr(self, "do_" + str(what))(*request)
        except (Stopped, Failed):
            raise                                      # ends this call as well
        except Exception as error:                     # noqa: BLE001  (the reader's to handle)
            return "error", type(error).__name__, str(error)

    def do_name(self, module, name):
        return self.task.look_up(module, name)

    def do_get(self, thing, name):
        check_attribute(thing, name)
        return getattr(thing, name)

    def do_set(self, thing, name, value):
        home = type(thing).__module__
        if name.startswith("_") or not home.startswith(("minidist.", "numpy.random")) or (
                home.startswith("minidist.ranks")):
            raise AttributeError(f"a {type(thing).__name__} has no {name} to set")
        setattr(thing, name, value)

    def do_call(self, thing, args, named):
        return placed(call, self.line)(thing, args, named)

    def do_operator(self, name, thing, *args):
        if name == "instancecheck":
            return isinstance(args[0], thing)
        if name in BUILT_IN:
            return BUILT_IN[name](thing, *args)
        if name not in OPERATORS:
            raise TypeError(f"no operator {name}")
        return getattr(type(thing), f"__{name}__")(thing, *args)

    def do_exit(self, thing, error):
        raised = None if error is None else RuntimeError(error)
        return type(thing).__exit__(thing, raised and RuntimeError, raised, None)

    def do_array(self, thing):
        return np.asarray(thing)

    def do_repr(self, thing):
        return repr(thing)

    # ---- values

    def give(self, x):
        """Let the process know an object by its number; a function of its own by that one's."""
        if isinstance(x, types.ModuleType):
            raise AttributeError("a module of the library stays with the grader")
        if getattr(x, "session", None) is self:
            return ["away", x.number]
        number = self.numbers_of_objects.get(id(x))
        if number is None:
            number = self.last = self.last + 1
            self.objects[number] = [x, 0]
            self.numbers_of_objects[id(x)] = number
        self.objects[number][1] += 1
        known = dict(rank=x.rank, size=x.size) if isinstance(x, Comm) else {}
        return ["home", number, known]

    @functools.cached_property
    def numbers_of_objects(self):
        return {}

    def drop(self, number, times):
        entry = self.objects[number]
        entry[1] -= times
        if entry[1] <= 0:
            del self.objects[number], self.numbers_of_objects[id(entry[0])]

    def find_home(self, number):
        return self.objects[number][0]

    def find_away(self, number, name, held):
        """A function of the process's.  The graph sees in it the arrays that it keeps alive."""
        held = [self.decode(x) for x in held]

        def of_the_reader(*args, held=held, **named):
            return self(of_the_reader, args, named)
        of_the_reader.session, of_the_reader.number = self, number
        of_the_reader.__qualname__ = str(name)
        weakref.finalize(of_the_reader, self.dropped.append, number).atexit = False
        return of_the_reader


OPERATORS = set("getitem setitem delitem contains enter add radd sub rsub mul rmul truediv rtruediv "
                "matmul rmatmul pow neg".split())
BUILT_IN = {"len": len, "iter": iter, "next": next, "bool": bool, "index": int, "float": float,
            "int": int}


def call(thing, args, named):
    return thing(*args, **named)


def placed(function, line):
    """The function as if it were written in this line of the reader's file: reports show that."""
    try:
        file, number, name = line.split(", ")
        number, name = int(number.removeprefix("line ")), name.removeprefix("in ")
        code = function.__code__.replace(co_filename=file, co_name=name,
                                         co_firstlineno=max(1, number - 1))
    except ValueError:
        return function
    return types.FunctionType(code, function.__globals__)


def check_attribute(thing, name):
    """Refuse what is private, and what would lead out of the library's objects."""
    allowed = OF_COMM if isinstance(thing, Comm) else (
        OF_STREAM if isinstance(thing, (Stream, Work)) else None)
    if name.startswith("_") or isinstance(thing, OPAQUE) or allowed and name not in allowed:
        raise AttributeError(f"a {type(thing).__name__} has no {name} that an exercise needs")


# ---- one function, graded

class Task:
    """One exercise function of a lesson, and one reader's file.  file: its name in messages"""

    def __init__(self, function, exercise, modules, source, file, seconds, megabytes):
        self.function, self.name, self.source, self.file = function, function.__name__, source, file
        self.owner = sys.modules[function.__module__]
        self.others = {f.__name__: f for f in exercise if f is not function}
        self.modules, self.seconds, self.megabytes = modules, seconds, megabytes
        self.sessions, self.idle, self.mine = [], [], threading.local()
        self.lock, self.over = threading.Lock(), False

    def session(self):
        """The process of this thread; a thread that has ended leaves its own to the next one."""
        lease = getattr(self.mine, "lease", None)
        if lease is None:
            lease = self.mine.lease = Lease(self)
        return lease.session

    def stand_in(self):
        """What the proof calls in the place of the library's function."""
        @functools.wraps(self.function)
        def of_the_reader(*args, **named):
            return self.session()(self.name, args, named)
        del of_the_reader.__wrapped__
        return of_the_reader

    def end(self):
        with self.lock:
            self.over = True
        for session in self.sessions:
            session.end()

    def look_up(self, module, name):
        """What a name of the library means.  Raises ImportError where it is not at hand"""
        known = module in self.modules or module == "minidist" or (
            module.startswith(ROOMS) and module not in NOT)
        inner = f"{module}.{name}"
        found = known and not name.startswith("__") and getattr(
            importlib.import_module(module), name, None)
        if isinstance(found, types.ModuleType) and (
                inner in self.modules or inner.startswith(ROOMS)):
            raise AttributeError(name)                 # the import system finds it itself
        if found is False or found is None or isinstance(found, types.ModuleType):
            raise ImportError(f"{inner} is not at hand in this exercise")
        if found is getattr(self.owner, self.name):
            raise ImportError(f"{inner} is the exercise itself")
        if callable(found) and not getattr(found, "__module__", "").startswith("minidist"):
            raise ImportError(f"{inner} is not minidist's own")
        return found


class Lease:
    """A thread's hold on a session."""

    def __init__(self, task):
        self.task = task
        with task.lock:
            if task.over:
                raise Failed("the trial has ended")
            self.session = task.idle.pop() if task.idle else None
        if self.session is None:
            self.session = Session(task)
            with task.lock:
                task.sessions.append(self.session)
            self.session.load()

    def __del__(self):
        session = getattr(self, "session", None)
        if session is not None and not session.dead:
            self.task.idle.append(session)


def trial(lesson, ranks, task):
    """Run the proof with the reader's function in place.  -> failed lines, bytes sent by all"""
    inner, sent = [None] * ranks, [None] * ranks

    def prove(comm):
        try:
            task.session()
            inner[comm.rank] = lesson.quietly(comm)
            with comm.counting() as counted:
                lesson.script.prove(inner[comm.rank])
            sent[comm.rank] = sum(count.bytes for group, count in counted.by_group.items()
                                  if group != "kit")
        except BaseException:
            task.end()                                   # whoever waits for another process
            raise

    outcome = substitute.Outcome()
    with substitute.patched((task.owner, task.name, task.stand_in())), seeded(task.seed):
        try:
            run_threads(ranks, prove, sync=True, timeout=substitute.TIMEOUT)
        except Failed as error:
            outcome.error = str(error)
        except Exception as error:
            outcome.error = substitute.describe(error)
    if inner[0]:
        outcome.checks, outcome.ledger = inner[0].checks, inner[0].counts
    return outcome, sent
