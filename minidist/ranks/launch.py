"""The entry of every command: start its ranks, watch over them, give its mistakes a plain ending.

    python -m lessons.ring -n 4
      |                                          this process stays, as supervisor
      +-- mpiexec -n 4 python -m lessons.ring    the mpiexec that belongs to this Python
            +-- rank 0 ... rank 3                each writes its row of the status file

The status file outlives its writers. When a rank dies without a word (a signal, a crash in C code,
os._exit), mpiexec kills the others within milliseconds, MPICH's even with status 0: the supervisor
then says which rank was first and what the others were doing, and its own status is not 0.
"""
import os
import selectors
import signal
import subprocess
import sys
import time

from minidist import BadInput
from minidist.ranks import environment, report, safety, watch


def run(main):
    """Run a command: its status is main()'s, or the job's; BadInput is a sentence and status 2."""
    try:
        environment.check_settings()
        ranks = wanted_ranks()
        if ranks is not None:
            sys.exit(supervise(ranks, [sys.executable, *rest_of_command()]))
        safety.speak_plainly()
        sys.exit(main())
    except BadInput as error:
        safety.refuse(error)
    except MemoryError as error:
        safety.refuse(BadInput(f"not enough memory: {error}; ask for something smaller"))
    except SystemExit as ending:
        if isinstance(ending.code, int):
            ending.code = safety.exit_status(ending.code)
        safety.leaving(ending.code)
        flush()
        raise
    except BrokenPipeError as error:
        safety.unread(error)


def flush():
    """Bring out what is still to be written while somebody hears of an error."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError as error:
        safety.unread(error)


def wanted_ranks():
    """Take `-n N` off the command line -> N, or None where these already are the ranks."""
    if "-n" not in sys.argv:
        return None
    at = sys.argv.index("-n")
    given = " ".join(sys.argv[at + 1:at + 2])
    del sys.argv[at:at + 2]
    if not given.isdecimal() or int(given) < 1:
        raise BadInput(f"-n {given}: give the number of ranks, such as -n 4")
    started = environment.size()
    if started not in (None, int(given)):
        raise BadInput(f"-n {given}, but mpirun has started {started} ranks: leave one of them out")
    return None if environment.launched() else int(given)


def rest_of_command():
    """This command line without the interpreter and without `-n N`."""
    words = list(sys.orig_argv[1:])
    at = len(words) - words[::-1].index("-n") - 1
    return words[:at] + words[at + 2:]


def command(ranks, argv):
    """The command line that runs argv on that many ranks."""
    if environment.lacking():
        raise BadInput(environment.lacking())
    return [environment.mpiexec(), "-n", str(ranks), *argv]


# -- the supervisor -----------------------------------------------------------------------------

def supervise(ranks, argv):
    """Run argv on ranks under mpiexec -> the job's exit status, with a report if one died."""
    full, signals, path = command(ranks, argv), Signals(), watch.create(ranks)
    settings = {"MINIDIST_STATUS": path, "MINIDIST_TERMINAL": "1" if at_keyboard() else ""}
    table = watch.Table(path)
    deaths = Deaths(table, path)
    try:
        job = subprocess.Popen(full, env={**environment.SETTINGS, **os.environ, **settings})
        over, ways = False, [job.terminate, job.kill]
        while not over:
            over = job.poll() is not None              # then one more look: who was it?
            died = deaths.look(0 if over else 0.05)
            if watch.nobody_reads() and not over:
                signals.hear(signal.SIGPIPE)
            if died and not signals.came:
                tell("minidist: the job ends, since a rank has died", table, deaths.rows)
            hurry(ways, signals, deaths.since)
        return ending(job.returncode, signals, table, deaths.rows)
    finally:
        deaths.close()
        os.unlink(path)


def at_keyboard():
    return sys.stdin is not None and sys.stdin.isatty()


def hurry(ways, signals, died):
    """End a job that was told to stop, or one of whose ranks has died, if it does not by itself."""
    patience = 10
    if signals.came:                                   # Ctrl-C reaches mpiexec, too; kill does not
        patience = 1 if signals.came[0] == signal.SIGINT else 0
    patience += 20 if len(ways) == 1 else 0            # it has been asked once
    if ways and time.monotonic() > min(signals.since, died) + patience:
        ways.pop(0)()


def ending(status, signals, table, dead):
    """Say how a job has ended, unless one of its ranks did -> the exit status"""
    if watch.nobody_reads() and status:
        watch.say("minidist: nobody reads what this job prints any more; it has ended")
        return 141
    if signals.came:
        tell(f"minidist: the job was stopped ({signals.came[0].name})", table, table.read())
        return 128 + signals.came[0]
    if status and environment.cramped() and (dead or not table.read()):
        watch.say(f"minidist: {environment.cramped()}")
    return safety.exit_status(status) or int(bool(dead))


def tell(headline, table, rows):
    """Report what the ranks were doing, unless one of them does."""
    if rows and table.claim():
        watch.say(report.explain(headline, rows))


class Signals:
    """Notices the first signal that asks this process to end.  came: it, in a list; since: when"""

    def __init__(self):
        self.came, self.since = [], float("inf")
        for name in "SIGINT", "SIGTERM", "SIGHUP":
            number = getattr(signal, name, None)       # Windows has no SIGHUP; nohup ignores it
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.hear)

    def hear(self, number, frame=None):
        if not self.came:
            self.came, self.since = [signal.Signals(number)], time.monotonic()


class Deaths:
    """Notices the first rank that ends without having said so.

    Each rank holds a line to this process (watch.call), which the system hangs up when the rank
    ends. mpiexec kills all others within milliseconds, often before this process runs again, so
    the order counts: the system hangs up before mpiexec hears of the death, and a selector hands
    lines out in the order in which they were hung up.

    rows: what everyone was doing at that moment; since: when it was.  Where the system has no such
    lines, the processes are looked for instead, twenty times a second: less sure of who was first.
    """

    def __init__(self, table, path):
        self.table, self.rows, self.since = table, [], float("inf")
        self.door, self.selector = watch.listen(path), selectors.DefaultSelector()
        if self.door:
            self.selector.register(self.door, selectors.EVENT_READ)

    def look(self, seconds):
        """Wait up to so many seconds for a rank to end -> was it the first death?"""
        gone = self.hung_up(seconds) if self.door else self.vanished(seconds)
        if not gone or self.rows:
            return False
        rows = self.table.read()
        for rank in gone:
            mine = [row for row in rows if row.rank == rank]
            if mine and not any(row.end for row in mine):
                for row in mine:
                    row.end = watch.DIED
                self.rows, self.since = rows, time.monotonic()
                return True
        return False

    def vanished(self, seconds):
        """Look for the processes of the ranks -> the ranks that are no more"""
        time.sleep(seconds)
        return [row.rank for row in self.table.read() if not watch.alive(row.pid)]

    def hung_up(self, seconds):
        """Hear all there is to hear -> the ranks that have hung up, in order"""
        ranks = []
        while found := self.selector.select(seconds):
            ranks += [self.heard(key) for key, _ in found]
            seconds = 0
        return ranks

    def heard(self, key):
        """Answer a new line, or hear who is at its other end -> the rank that hung up, or None"""
        line, rank = key.fileobj, key.data
        if line is self.door:
            self.selector.register(line.accept()[0], selectors.EVENT_READ)
        elif told := line.recv(16):
            self.selector.modify(line, selectors.EVENT_READ, int(told))
        else:
            self.selector.unregister(line)
            line.close()
            return rank
        return None

    def close(self):
        """Hang up, and leave no address behind."""
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()
        self.selector.close()
        watch.remove_door(self.table.file.name)
