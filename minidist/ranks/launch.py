"""The entry of every command: start its ranks, watch over them, give its mistakes a plain ending.

    python -m lessons.ring -n 4
      |                                          this process stays, as supervisor
      +-- mpiexec -n 4 python -m lessons.ring    the mpiexec that belongs to this Python
            +-- rank 0 ... rank 3                each writes its row of the status file

The status file outlives its writers. When a rank dies without a word (a signal, a crash in C code,
os._exit), mpiexec kills the others within milliseconds, MPICH's even with status 0: the supervisor
then says which rank was first and what the others were doing, and its own status is not 0.
"""
import importlib.util
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
        ranks = wanted_ranks()
        if ranks is not None:
            sys.exit(supervise(ranks, [sys.executable, *rest_of_command()]))
        sys.exit(main())
    except BadInput as error:
        safety.refuse(error)
    except SystemExit as ending:
        safety.leaving(ending.code)
        raise


def wanted_ranks():
    """Take `-n N` off the command line -> N, or None where these already are the ranks."""
    if "-n" not in sys.argv:
        return None
    at = sys.argv.index("-n")
    given = " ".join(sys.argv[at + 1:at + 2])
    del sys.argv[at:at + 2]
    if not given.isdigit() or int(given) < 1:
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
    mpiexec = environment.mpiexec()
    if importlib.util.find_spec("mpi4py") is None:
        raise BadInput(f"{sys.executable} has no mpi4py: pip install mpi4py mpich")
    if mpiexec is None:
        raise BadInput("no mpiexec beside this Python or on PATH: pip install mpich")
    return [mpiexec, "-n", str(ranks), *argv]


# -- the supervisor -----------------------------------------------------------------------------

def supervise(ranks, argv):
    """Run argv on ranks under mpiexec -> the job's exit status, with a report if one died."""
    full, path, stopped = command(ranks, argv), watch.create(ranks), []
    settings = {"MINIDIST_STATUS": path, "MINIDIST_TERMINAL": "1" if sys.stdin.isatty() else ""}
    job = subprocess.Popen(full, env={**environment.SETTINGS, **os.environ, **settings})
    signal.signal(signal.SIGINT, lambda *_: stopped.append(signal.SIGINT))    # mpiexec got it, too
    signal.signal(signal.SIGTERM, lambda *_: (stopped.append(signal.SIGTERM), job.terminate()))
    try:
        table = watch.Table(path)
        deaths = Deaths(table, path)
        over = False
        while not over:
            over = job.poll() is not None              # then one more look: who was it?
            if deaths.look(0 if over else 0.05) and not stopped:
                tell("minidist: the job ends, since a rank has died", table, deaths.rows)
            if deaths.rows and not over and time.monotonic() > deaths.since + 10:
                job.terminate()
        if stopped:
            tell(f"minidist: the job was stopped ({stopped[0].name})", table, table.read())
            return 128 + stopped[0]
        return job.returncode % 256 or int(bool(deaths.rows))
    finally:
        os.unlink(path)


def tell(headline, table, rows):
    """Report what the ranks were doing, unless one of them does."""
    if rows and table.claim():
        watch.say(report.explain(headline, rows))


class Deaths:
    """Notices the first rank that ends without having said so.

    Each rank holds a line to this process (watch.call), which the system hangs up when the rank
    ends. mpiexec kills all others within milliseconds, often before this process runs again, so
    the order counts: the system hangs up before mpiexec hears of the death, and a selector hands
    lines out in the order in which they were hung up.

    rows: what everyone was doing at that moment; since: when it was.
    """

    def __init__(self, table, path):
        self.table, self.rows, self.since = table, [], None
        self.door, self.selector = watch.listen(path), selectors.DefaultSelector()
        self.selector.register(self.door, selectors.EVENT_READ)

    def look(self, seconds):
        """Wait up to so many seconds for a rank to end -> was it the first death?"""
        gone = self.hung_up(seconds)
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
