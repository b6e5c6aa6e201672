"""The safety net of an MPI rank: however it ends, the others do not wait for it for ever.

    returns                 leaves; who still waits for it is reported by the watchdog
    raises                  traceback, what the others were doing, and the whole job ends
    sys.exit(3)             the same, unless all ranks leave like this: then the job's status is 3
    BadInput                one sentence, status 2, if all ranks raise it, as they should
    Ctrl-C, SIGTERM         where everyone was, and the end, at the first press

An MPI job does none of this by itself: a rank that raises leaves the others waiting. The first
comm.world() installs the net, except in IPython, whose sessions outlive their errors.
"""
import atexit
import builtins
import os
import signal
import sys
import threading
import time
import traceback

from minidist import BadInput
from minidist.ranks import arrive, environment, report, watch

GRACE = 30.0                    # seconds in which all ranks, unless blocked, leave the same way
SUPERVISED = "MINIDIST_STATUS" in os.environ

_net = None


def install(wire):
    """Put the net under this process.  Collective"""
    global _net
    if wire.size > 1 and wire.rank == 0:
        watch.say_once(environment.crowded())
    if _net is None and not in_notebook():
        _net = Net(wire)


def in_notebook():
    """Is this IPython, whose sessions outlive their errors?"""
    return hasattr(builtins, "__IPYTHON__")


def speak_plainly():
    """From here on BadInput is a sentence in a script of one's own, too, without launch.run."""
    if _net is None and sys.excepthook is sys.__excepthook__:
        sys.excepthook = before_the_net


def before_the_net(kind, error, trace):
    """Show an error that nobody caught before the ranks were joined."""
    if issubclass(kind, BadInput):
        refuse_alone(error)
        os._exit(2)
    if environment.launched():
        watch.last_words(labelled(environment.rank(), kind, error, trace))
    else:
        sys.__excepthook__(kind, error, trace)


def labelled(rank, kind, error, trace):
    """A traceback, each line of which says whose it is."""
    lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
    return "\n".join(f"[rank {rank}] {line}" for line in lines)


class Net:
    """What one process does when its program ends."""

    def __init__(self, wire):
        self.rank, self.size, self.status, self.code = wire.rank, wire.size, wire.status, 0
        self.abort, self.finalize, self.signalled = wire.abort, wire.finalize, False
        self.dog = start_watchdog(wire)
        self.table = self.dog.table
        sys.excepthook, sys.exit = self.crash, self.exit
        atexit.register(self.leave)
        catch_signals(self.stopped)

    def exit(self, code=None):
        """Take the place of sys.exit, whose status nobody else gets to see."""
        if threading.current_thread() is threading.main_thread():
            self.code = code
        raise SystemExit(exit_status(code) if isinstance(code, int) else code)

    def mark(self, end):
        """Write down how this rank ends."""
        for status in self.dog.statuses:           # of this thread and of its streams
            status.end, status.now = status.end or end, None
        self.dog.write()

    def leave(self):
        """The interpreter ends: with status 0, or like everyone else, or the job ends with it."""
        if self.code in (None, 0):
            self.mark("has left")
        elif not self.status.end:
            code = exit_status(self.code)
            self.mark(f"has left with exit status {code}")
            if not self.together():
                self.end(f"minidist: rank {self.rank} left with exit status {code}", code)

    def crash(self, kind, error, trace):
        """An error that nobody caught: show it and end the job, whatever else goes wrong."""
        try:
            self.show(kind, error, trace)
        finally:
            self.abort(1)
            os._exit(1)

    def show(self, kind, error, trace):
        """Say what all ranks did, then where the error came from, and end the job."""
        if issubclass(kind, BadInput):
            self.refuse(error)
            self.finalize()
            os._exit(2)
        if issubclass(kind, KeyboardInterrupt):
            time.sleep(0.1)
            if self.signalled:                    # the thread that listens for signals ends us
                time.sleep(10)
        self.mark(f"raised {kind.__name__}: {report.words(error)}")
        where = report.line_of_error(trace)
        self.end(f"minidist: rank {self.rank} raised {kind.__name__} at {where}; the job ends",
                 130 if issubclass(kind, KeyboardInterrupt) else 1,
                 labelled(self.rank, kind, error, trace))

    def refuse(self, error):
        """BadInput: one sentence for all, or, if only some ranks raised it, as any error."""
        self.mark(f"refused its input: {error}")
        if not self.together():
            self.end(f"[rank {self.rank}] error: {error}", 2)
        if self.rank == 0:
            watch.last_words(f"error: {error}")
        else:
            time.sleep(0.5)                       # a launcher ends all as soon as one has ended
        self.code = 2

    def stopped(self, number):
        """Ctrl-C, or the launcher ends us: in a moment it will kill, so report at once."""
        self.signalled = True
        self.dog.write()
        if not SUPERVISED and self.table.claim():
            time.sleep(0.1)                       # the others write their rows, too
            story = self.table.story(f"minidist: the job was stopped ({number.name})")
            if number == signal.SIGTERM and watch.DIED not in story:
                watch.say_past_launcher(story)
            watch.last_words(story)
        else:
            time.sleep(0.5)                       # somebody else, or the supervisor, reports
        self.abort(128 + number)

    def together(self):
        """Wait until every rank of this machine has ended or is blocked -> have all ended?"""
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            going = [row for row in self.table.read() if row.thread == "main" and not row.end]
            if all(row.age > 0.5 for row in going):
                return not going
            time.sleep(0.05)
        return False

    def end(self, headline, code, more=""):
        """Report, unless somebody does, and end the job."""
        if self.table.claim():
            time.sleep(3 * self.dog.tick)        # let the others write what they do now
            watch.last_words("\n".join(filter(None, [self.table.story(headline), more])))
        else:
            time.sleep(5 + 3 * self.dog.tick)    # who reports also ends the job
        self.abort(code)
        os._exit(code)


def start_watchdog(wire):
    """Open this machine's table, the launcher's or one that its first rank makes, and watch."""
    node, path = wire.node(), os.environ.get("MINIDIST_STATUS", "")
    theirs = all(node.gather(os.path.exists(path)))
    if not theirs:
        path = node.gather(watch.create(wire.size) if node.rank == 0 else "")[0]
    # Several machines have several tables; the first machine is the first to lose its patience.
    dog = watch.Watchdog(watch.Table(path), wire.rank, wire.statuses, wire.abort,
                         patience=5 * node.ranks[0] / wire.size)
    if theirs:
        dog.line = watch.call(path, wire.rank)
    node.close()                                  # which waits: every row is there
    if not theirs and node.rank == 0:
        os.unlink(path)
    return dog


def catch_signals(act):
    """Call act(signal) in a thread at the first Ctrl-C or SIGTERM, also while MPI blocks this one.

    Python's own handlers run between two steps of the main thread only; the wake-up byte of a
    signal that has a handler comes at once.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: None)

    def listen():
        while (number := os.read(ear, 1)[0]) not in (signal.SIGINT, signal.SIGTERM):
            pass
        act(signal.Signals(number))
    threading.Thread(target=listen, daemon=True).start()


def refuse(error):
    """End a command whose input cannot be met: one sentence, status 2."""
    if _net is not None:
        _net.refuse(error)
    else:
        refuse_alone(error)
    sys.exit(2)


def refuse_alone(error):
    """Say what is wrong where no other rank can be asked: rank 0 for all, or who else refuses."""
    rank = environment.rank()
    if arrive.speaks("refusal"):
        watch.say(f"[rank {rank}] error: {error}" if rank else f"error: {error}")
        arrive.linger("refusal")
    if environment.launched():
        time.sleep(0.3)                           # a launcher ends all as soon as one has ended


def leaving(code):
    """Note the status with which this process is about to leave."""
    if _net is not None:
        _net.code = code


def unread(error):
    """End a command whose output nobody reads any more, as `| head` does: no words, status 141."""
    if not watch.nobody_reads():
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still in a buffer
    leaving(141)
    sys.exit(141)


def exit_status(code):
    """The status of sys.exit(code): eight bits of it, but never 0 for what is not 0."""
    if code is None:
        return 0
    return code % 256 or int(code != 0) if isinstance(code, int) else 1
