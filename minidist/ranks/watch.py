"""The watchdog: every rank writes down what it does, and a wait that lasts too long is reported.

         rank 0        rank 1        rank 2            each process: the program, and a thread
           |             |             |               that writes its row four times a second
    +------v------+------v------+------v------+
    | row 0       | row 1       | row 2       |        a small file in memory, one per machine
    +-------------+-------------+-------------+

Whoever sees its own wait pass MINIDIST_TIMEOUT (60 seconds; 0 turns it off) claims the right to
speak, reads all rows, prints who waits for whom, and ends the job. The rows outlive their writers:
the launcher can tell what everyone was doing when one was killed.
"""
import json
import mmap
import os
import select
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress

from minidist.ranks import environment, report

try:
    import fcntl
except ImportError:                               # Windows: two ranks may report the same hang
    fcntl = None

HEAD = 16                                         # byte 0: claimed?  bytes 8 to 15: how many ranks
MAX_BYTES = 12                                    # of a character in JSON: two \uXXXX
TIMED_OUT = 70                                    # the job's exit status after a report
DIED = "died without a word (killed, crashed, or os._exit)"


def create(size):
    """Make an empty table for `size` ranks -> its path"""
    file, path = tempfile.mkstemp(prefix="minidist-")
    os.ftruncate(file, HEAD + size * 2 * half(size))
    os.pwrite(file, size.to_bytes(8, "little"), 8)
    os.close(file)
    return path


def half(size):
    """Bytes for the two threads of a rank: 6 texts of LONGEST characters, all members' numbers."""
    return 2 * (1024 + 6 * MAX_BYTES * report.LONGEST + len(json.dumps([size] * size)))


def listen(path):
    """Open the launcher's end of the lines over which it notices that a rank has ended.

    None where the system has no such thing, or refuses it.
    """
    try:
        door = socket.socket(socket.AF_UNIX)
        door.bind(door_of(path))
        door.listen(1024)
        return door
    except (OSError, AttributeError):
        return None


def call(path, rank):
    """Open a rank's end of its line to the launcher: hung up when one of the two ends, or None."""
    try:
        line = socket.socket(socket.AF_UNIX)
        line.connect(door_of(path))
        line.sendall(str(rank).encode())
        return line
    except (OSError, AttributeError):             # as above, or the launcher has gone
        return None


def hung_up(line):
    """Has the launcher at the other end of a line gone?"""
    try:
        return line is not None and line.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:                       # it never says anything while it lives
        return False
    except OSError:
        return True


def remove_door(path):
    """Leave no address behind, where it is a file."""
    with suppress(OSError):
        if not door_of(path).startswith("\0"):
            os.unlink(door_of(path))


def door_of(path):
    """The address that belongs to a table.  Linux needs no file for it, and no short path"""
    return "\0" + os.path.basename(path) if sys.platform == "linux" else path + ".door"


class Table:
    """The rows of all ranks of one machine, in a file that its processes share.

    A row has two halves, written in turn: a reader always finds one that is whole.
    """

    def __init__(self, path):
        self.file = open(path, "r+b")                                      # noqa: SIM115
        self.map = mmap.mmap(self.file.fileno(), 0)
        self.size, self.turn = int.from_bytes(self.map[8:16], "little"), 0
        self.half = half(self.size)

    def write(self, rank, rows):
        """Replace a rank's row: one entry per thread."""
        text = json.dumps([vars(row) for row in rows], default=str).encode()
        self.turn = 1 - self.turn
        start = self.starts(rank)[self.turn]
        if len(text) <= self.half:                # else an older one stays, which shows its age
            self.map[start:start + self.half] = text.ljust(self.half)

    def starts(self, rank):
        first = HEAD + 2 * self.half * rank
        return first, first + self.half

    def read(self):
        """The rows of all ranks that have ever written one, in rank order."""
        return [row for rank in range(self.size) for row in self.entries(rank)]

    def entries(self, rank):
        """One rank's newest whole row: its threads."""
        found = []
        for start in self.starts(rank):
            text = self.map[start:start + self.half].strip(b" \0")
            try:
                found.append([report.Row(**entry) for entry in json.loads(text or "[]")])
            except ValueError:                    # being written at this moment
                pass
        return max(found, key=lambda rows: rows[0].beat if rows else 0, default=[])

    def story(self, headline):
        """The report of what all ranks do now, or did when they died."""
        rows = self.read()
        for row in rows:
            if not row.end and not alive(row.pid):
                row.end = DIED
        absent = sorted(set(range(self.size)) - {row.rank for row in rows})
        if absent:
            headline += f"\n  rank {', '.join(map(str, absent))}: not on this machine"
        try:
            return report.explain(headline, rows)
        except Exception as error:                # noqa: BLE001  (the headline must come through)
            return f"{headline}\n  (no report: {error!r})"

    def claim(self):
        """Ask for the right to report: True for exactly one caller on this machine."""
        if fcntl:
            fcntl.lockf(self.file, fcntl.LOCK_EX)
        try:
            first = not self.claimed()
            self.map[0] = 1
            return first
        finally:
            if fcntl:
                fcntl.lockf(self.file, fcntl.LOCK_UN)

    def claimed(self):
        return self.map[0] == 1


class Watchdog:
    """Writes one rank's row again and again, and barks when a wait has lasted too long."""

    def __init__(self, table, rank, statuses, abort, patience=0.0):
        self.table, self.rank, self.statuses, self.abort = table, rank, statuses, abort
        self.timeout = environment.timeout()
        self.patience = patience                  # on several machines, the later ones wait longer
        self.tick = min(0.25, self.timeout / 8) if self.timeout else 0.25
        self.seen, self.lock, self.pardoned, self.line = {}, threading.Lock(), 0.0, None
        self.write()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            time.sleep(self.tick)
            with suppress(Exception):             # nothing that goes wrong here ends the watch
                self.look()

    def look(self):
        """Write this rank's row; is it time to bark?"""
        age = max(row.age for row in self.write())
        if self.timeout and age > self.timeout + self.patience:
            if any(row.work and not row.silence for row in self.table.read()):
                self.pardoned = time.monotonic()  # to wait for honest work is no hang
            elif self.table.claim():
                self.bark(f"minidist: rank {self.rank} has waited {age:.1f} s, longer than "
                          f"MINIDIST_TIMEOUT={self.timeout:g}; the job ends")
        if hung_up(self.line) and self.table.claim():
            with suppress(OSError):
                os.unlink(self.table.file.name)   # as it would have done
            self.bark("minidist: the process that started this job has been killed; the job ends")

    def write(self):
        """Put this rank's threads into the table -> their rows"""
        with self.lock:
            rows = [report.row(self.rank, s, self.age(s)) for s in list(self.statuses)]
            self.table.write(self.rank, rows)
            return rows

    def age(self, status):
        """Seconds since this thread was first seen in the wait that it is in now."""
        now, clock = status.now, time.monotonic()
        before, since = self.seen.get(status, (None, clock))
        if now is not before:                     # a new tuple for every message: compare identity
            since = clock
        self.seen[status] = now, since
        return 0.0 if now is None else clock - max(since, self.pardoned)

    def bark(self, headline):
        """Report and end the job.  Exactly one rank of a machine comes here"""
        time.sleep(2 * self.tick)                 # let the others write what they do now
        try:
            last_words(self.table.story(headline))
        finally:
            self.abort(TIMED_OUT)


def alive(pid):
    """Does this process still run?  One that has ended may wait to be collected: state Z"""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:                               # a system without /proc
        return True


def say(text):
    """Write to stderr in one piece, from any thread; to stdout where stderr is closed."""
    data = (text + "\n").encode(errors="backslashreplace")
    for file in 2, 1:
        with suppress(OSError):
            while data:
                data = data[os.write(file, data):]


def say_once(text):
    """Say something, unless it has been said by this process, or is nothing."""
    if text and text not in _said:
        _said.add(text)
        sys.stderr.write(text + "\n")             # in a notebook: below the cell


_said = set()


def last_words(text):
    """Say something just before the job is ended: the launcher needs a moment to pass it on."""
    say(text)
    time.sleep(0.3)


def nobody_reads():
    """Has the reader of stdout gone, as `| head` does?  False where that cannot be known"""
    try:
        watcher = select.poll()
        watcher.register(1, 0)                    # errors and hang-ups are always told
        return bool(watcher.poll(0))
    except (AttributeError, OSError):             # a system without it
        return False


def say_past_launcher(text):
    """Write to the stderr of Open MPI's mpirun, which passes on nothing more once it is stopped."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        try:
            with open(f"/proc/{os.getppid()}/fd/2", "a") as theirs:
                theirs.write(text + "\n")
        except OSError:
            pass
