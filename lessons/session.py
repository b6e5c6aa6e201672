"""The grader's end of a conversation with a process of the reader's (lessons/pupil.py).

A call goes there; until its answer comes, what the process asks for is done here, on the thread
that called: lessons/asked.py says what that may be.
"""
import builtins
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


from lessons import mirrors
from lessons.asked import KEPT, Asked
from lessons.reach import Reach
from minidist import THREAD_VARIABLES
from minidist.ranks.comm import Comm
from minidist.ranks.threads import Stopped

PUPIL = Path(__file__).with_name("pupil.py")
DEEPEST = 50                                         # calls of the exercise inside one another
WALL = 10                                            # seconds in all, for each of computing
OPEN = set()                                         # the sessions whose process may run


class Failed(Exception):
    """The reader's function did not do its work: what the record says."""


class Cheated(Failed):
    """It did what no exercise needs."""


def failed_as(name, text):
    """The error of the reader's function, as one that a proof may expect: a ValueError, say."""
    kind = getattr(builtins, name, None)
    fits = isinstance(kind, type) and issubclass(kind, Exception)
    return type(name, (Failed, kind) if fits else (Failed,), {})(text)


class Session(mirrors.Mirrors, Asked):
    """One process, and what it was given.  task: what it is to run (see judge.Task)"""

    def __init__(self, task):
        super().__init__(1)
        self.task, self.objects, self.dropped = task, {}, []
        self.known = {}                               # id of an object -> its number
        self.reach, self.open, self.forgot = Reach(), set(), False
        self.stack, self.busy, self.turn = [], False, threading.Condition()
        self.folder = tempfile.mkdtemp(prefix="minidist-grade-")
        self.pipe, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(PUPIL), str(theirs.fileno()),
                 str(task.seconds), str(task.megabytes), str(os.getpid())],
                cwd=self.folder, pass_fds=[theirs.fileno()], start_new_session=True,
                env=dict.fromkeys(THREAD_VARIABLES, "1"), stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        OPEN.add(self)
        self.deadline, self.line, self.dead = time.monotonic() + WALL * task.seconds, "", ""

    def load(self):
        """Let the process run the reader's file."""
        self.converse("load", self.task.source, self.task.file, self.task.others)

    def __call__(self, target, args, named):
        """Call one of the reader's functions: the exercise by its name, or what it handed out."""
        if len(self.stack) > DEEPEST:
            raise Failed(f"{self.task.name} calls itself through the library")
        self.reach.give([*args, *named.values()])
        return self.converse("call", target, args, named)

    def converse(self, *request):
        """Ask for something, and do what the process asks for until it has answered."""
        me = object()
        self.take_turn(lambda: True)
        self.stack.append(me)
        try:
            self.send(*request)
            while True:
                kind, *message = self.receive()
                if kind != "ask":
                    return self.ended(kind, *message)
                self.pass_turn()
                answer = self.answer(*message)
                self.take_turn(lambda: self.stack[-1] is me)
                self.send(*answer)
        except BaseException as error:
            self.leave(error)
            raise
        finally:
            self.stack.remove(me)
            if not self.stack and not self.open:
                self.forget()
                self.forgot = True
            self.pass_turn()

    def leave(self, error):
        """End a call that the proof has left, as one that it kills at a certain moment."""
        if isinstance(error, Exception) or isinstance(error, (KeyboardInterrupt, SystemExit)):
            return                                     # the call has ended, or all does
        self.take_turn(lambda: True)
        kind = "ask"
        while kind == "ask":
            self.send("leave")
            kind, *_ = self.receive()

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
        """Return what the function returned, or raise what it raised."""
        if kind == "return":
            return message[0]
        if kind != "raise":
            raise self.end(Cheated(f"broke the protocol: {str(kind)[:20]!r}"))
        name, text, where = map(str, message)
        if name == "NotImplementedError":
            raise failed_as(name, f"{where or self.task.file}: not written yet")
        if name == "SyntaxError":
            text = text.partition(" (")[0]
        said = text.startswith(self.task.file) or not where
        raise failed_as(name, text if said else f"{where}: {name}: {text}")

    # ---- the pipe

    def send(self, *message):
        if self.dead:
            raise Failed(self.dead)
        dropped, self.dropped = self.dropped, []
        try:
            self.pipe.sendall(self.pack(*message, dropped=dropped, forget=self.forgot))
            self.forgot = False
        except OSError:
            raise self.end(Failed(self.obituary())) from None

    def receive(self):
        try:
            message, head = self.unpack(*mirrors.read(self.some))
            self.line = str(head.get("line", ""))
            for number, times in head.get("dropped", ()):
                self.drop(number, times)
            refused = head.get("refused")
        except TimeoutError:
            raise self.end(Failed(f"{self.line or self.task.file}: no answer within "
                                  f"{WALL * self.task.seconds} s")) from None
        except (EOFError, OSError):
            raise self.end(Failed(self.obituary())) from None
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise self.end(Cheated(f"broke the protocol: {error}")) from None
        if refused:
            raise self.end(Cheated(f"{refused[0]}: an exercise needs no such thing"))
        return message

    def some(self, size):
        self.pipe.settimeout(max(0.01, self.deadline - time.monotonic()))
        return self.pipe.recv(size)

    def obituary(self):
        """Say how the process ended."""
        try:
            status = self.process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its pipe to the grader"
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            return f"was ended: it computed for more than {self.task.seconds} s"
        if status < 0:
            return f"its process was ended by {signal.Signals(-status).name}"
        return f"its process left before it answered (exit status {status})"

    def end(self, error=None):
        """Stop the process and what it started.  -> error"""
        self.dead = self.dead or str(error or "the trial has ended")
        OPEN.discard(self)
        self.abandon()
        self.process.wait()
        self.pipe.close()
        with self.turn:
            self.turn.notify_all()
        return error

    def abandon(self):
        """Kill the process and what it started, and clear its folder; it waits for no lock."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- what the process asks for

    def answer(self, what, *request):
        """Do what is asked.  -> ("reply", value) or ("error", name, text)"""
        try:
            return "reply", getattr(self, "do_" + str(what))(*request)
        except (Stopped, Failed):
            raise                                      # ends this call as well
        except Exception as error:                     # noqa: BLE001  (the reader's to handle)
            return "error", type(error).__name__, str(error)

    # ---- values

    def give(self, x):
        """Let the process know an object by a number; a function of its own by that one's."""
        if isinstance(x, types.ModuleType):
            raise AttributeError("a module of the library stays with the grader")
        if getattr(x, "session", None) is self:
            return ["away", x.number]
        number = self.known.get(id(x))
        if number is None:
            number = self.known[id(x)] = self.last = self.last + 1
            self.objects[number] = [x, 0]
        self.objects[number][1] += 1
        return ["home", number, dict(rank=x.rank, size=x.size) if isinstance(x, Comm) else {}]

    def drop(self, number, times):
        """The process has let go of an object, which it was given so many times."""
        entry = self.objects[number]
        entry[1] -= times
        if entry[1] <= 0:
            del self.objects[number], self.known[id(entry[0])]

    def encode_array(self, x):
        said, owner = super().encode_array(x), mirrors.owner(x)
        kept = KEPT.get(id(owner))
        if kept is not None and kept() is owner:
            self.buffers[said[1]].flat.flags.writeable = False
            said[-1] = False
        return said

    def find_home(self, number):
        return self.objects[number][0]

    def find_away(self, number, name, held):
        """A function of the process's.  The graph sees in it the arrays that it keeps alive."""
        held = [self.decode(x) for x in held]

        def of_the_reader(*args, held=held, **named):
            return self(of_the_reader, args, named)
        of_the_reader.session, of_the_reader.number = self, number
        of_the_reader.__qualname__ = str(name)
        weakref.finalize(of_the_reader, self.drop_function, number).atexit = False
        return of_the_reader

    def find_steps(self, number, name):
        """A generator of the process's.  Until it is gone, what its process holds is mirrored."""
        self.open.add(number)
        step = self.find_away(number, name, [])

        def generator():
            while True:
                try:
                    value = step()
                except StopIteration:
                    return
                yield value
        return generator()

    def drop_function(self, number):
        self.open.discard(number)
        self.dropped.append(number)
