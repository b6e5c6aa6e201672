"""Who waits for whom: the report of a hang, made of one row per thread of every rank.

    rank 0 waits 2.1 s for a message from rank 1     recv, 8 bytes            lesson.py:12 in step
    rank 1 waits 2.1 s for a message from rank 0     recv, 8 bytes            lesson.py:12 in step
    cause: a cycle of receives, 0 <- 1 <- 0: each waits for the next, and nobody sends

Rows come from the status file (ranks are processes), or straight from ranks that are threads.
"""
import builtins
import os
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
LIBRARY = os.path.dirname(os.path.abspath(threading.__file__)) + os.sep
RANKS = os.path.dirname(os.path.abspath(__file__)) + os.sep
LONGEST = 200                      # characters of a text in a row: a row has a fixed size


class Status:
    """What one thread of a rank does: `now` is (comm, kind, to, source, nbytes), or None.

    The hot path writes `now` and nothing else; everything below is worked out when somebody asks.
    """

    def __init__(self, thread_id, name="main"):
        self.now, self.thread_id, self.name = None, thread_id, name
        self.idle, self.end, self.origin = False, "", ""
        self.failed = ""                            # a stream: what its last work raised
        self.work = ""                              # long work of its own that others wait for


@dataclass
class Row:
    """One thread of one rank, as the report shows it.  Ranks here are ranks of the world"""
    rank: int
    thread: str = "main"
    pid: int = 0
    beat: float = 0.0              # the moment of writing: old rows belong to ranks that are stuck
    age: float = 0.0               # seconds of waiting
    kind: str = ""                 # the call it waits in; empty: it computes
    op: str = ""                   # the collective around it
    number: int = 0                # the how-manieth collective of the group
    detail: str = ""
    group: str = ""
    members: tuple = ()
    to: int | None = None
    source: int | None = None
    nbytes: int = 0
    line: str = ""
    idle: bool = False             # a stream with nothing to do
    work: str = ""                 # what it does by itself, for long, while others wait
    end: str = ""                  # "has left ...", "raised ...": this thread does nothing more

    @property
    def waits(self):
        return bool(self.kind) and not self.end

    @property
    def silence(self):
        """Seconds since this was written, if that is long; the watchdog writes every 0.25 s."""
        age = time.monotonic() - self.beat
        return age if age > 3 else 0

    def peers(self):
        """The ranks that could let this one go on."""
        return [r for r in (self.source, self.to) if r is not None]


def row(rank, status, age=0.0):
    """Work out the row of a status, at this moment; whatever a caller has passed, make one."""
    try:
        return row_of(rank, status, age)
    except Exception as error:                     # noqa: BLE001  (the reporter must not end)
        return Row(rank, status.name, os.getpid(), time.monotonic(), age,
                   line=words(error, repr)[:LONGEST], end=status.end[:LONGEST])


def row_of(rank, status, age):
    end, line = status.end or status.failed, status.origin   # a stream: where it was submitted
    if not end and not line:
        line = line_of(status.thread_id)
    made = Row(rank, status.name, os.getpid(), time.monotonic(), age, line=line[:LONGEST],
               idle=status.idle, work=status.work, end=end[:LONGEST])
    now = status.now
    if now is not None:
        comm, made.kind, to, source, made.nbytes = now
        made.group, made.members = comm.name[:LONGEST], tuple(comm.ranks)
        op, made.number, detail = comm.current()
        made.op, made.detail = op[:LONGEST], "" if detail is None else words(detail)[:LONGEST]
        made.to = None if to is None else comm.ranks[int(to)]
        made.source = None if source is None else comm.ranks[int(source)]
    return made


def line_of(thread_id):
    """The innermost line of a thread in the reader's own code."""
    frame = sys._current_frames().get(thread_id)
    return user_line(frame) if frame else ""


def line_of_error(trace):
    """The innermost line of the reader's own code through which an error came."""
    while trace.tb_next:
        trace = trace.tb_next
    return user_line(trace.tb_frame)


def user_line(frame):
    """The innermost line at or above a frame that is the reader's own.

    In a command of ours nothing is: then the innermost line that is not about ranks.
    """
    frames = [frame]
    while frames[-1].f_back:
        frames.append(frames[-1].f_back)
    found = next((f for f in frames if the_readers(f.f_code.co_filename)), None) or next(
        (f for f in frames if not f.f_code.co_filename.startswith((RANKS, LIBRARY, "<"))), frame)
    path = shown(found.f_code.co_filename)
    return f"{path}:{found.f_lineno} in {found.f_code.co_name}"


def the_readers(path):
    """Is a file neither minidist's nor Python's?"""
    return not path.startswith((HERE, "<frozen")) and (
        not path.startswith(LIBRARY) or path.startswith(os.path.dirname(HERE[:-1])))


def shown(path):
    """A file's name, as short as it is clear: from the working directory, or a notebook's cell."""
    notebook = getattr(builtins, "get_ipython", lambda: None)()
    if notebook and path in (cells := getattr(notebook.compile, "_filename_map", {})):
        return f"In[{cells[path]}]"
    try:
        here = os.getcwd() + os.sep
    except OSError:                                # it has been deleted
        here = os.sep
    return path[len(here):] if path.startswith(here) else os.path.basename(path)


def words(thing, how=str):
    """The text of anything, also of what cannot be printed."""
    try:
        return how(thing)
    except Exception:                              # noqa: BLE001  (an error in its own __str__)
        return f"{type(thing).__name__}, which cannot be printed"


@contextmanager
def at_work(status, what):
    """`with` this, the thread of a status does long work of its own: no wait for it is too long."""
    status.work = what
    try:
        yield
    finally:
        status.work = ""


# -- the text -----------------------------------------------------------------------------------

def explain(headline, rows):
    """The report: headline, one line per thread, and the cause where it can be told."""
    shown = [r for r in rows if not r.idle]
    lines = [headline, *map(describe, shown)]
    why = cause(rows)
    return "\n".join(lines + (["  cause: " + why] if why else []))


def describe(row):
    """One line of the report."""
    name = f"  rank {row.rank}" if row.thread == "main" else f"  rank {row.rank} ({row.thread})"
    if row.end:
        return f"{name} {row.end}"
    silent = f"  [no sign of life for {row.silence:.0f} s]" if row.silence else ""
    if not row.waits:
        return f"{name} {row.work or 'computes'}  at {row.line}{silent}"
    age = f" {row.age:.1f} s" if row.age else ""
    return f"{name} waits{age} {awaited(row)}  {call(row)}  at {row.line}{silent}"


def awaited(row):
    """Whom a row waits for, in words."""
    if row.kind in ("send", "isend"):
        return f"for rank {row.to} to receive"
    if row.kind == "work":
        return "for its background stream"
    if row.source is None:
        return "for every rank of its group"
    if row.to is None or row.to == row.source:
        return f"for a message from rank {row.source}"
    return f"for a message from rank {row.source} (and rank {row.to} to receive)"


def call(row):
    """The call a row waits in, in words."""
    words = [row.kind]
    if row.op:
        words += ["in", operation(row)]
    if row.detail:
        words.append(row.detail)
    size = f", {row.nbytes} bytes" if row.peers() else ""
    return f"{' '.join(words)}{size}, group {row.group}"


def operation(row):
    return f"{row.op} #{row.number}" if row.number else row.op


# -- the cause ----------------------------------------------------------------------------------

def cause(rows):
    """Name what stopped the ranks, or return "" where it cannot be told."""
    waits = [(row, other) for row in rows if row.waits for other in awaited_rows(row, rows)]
    for find in somebody_ended, different_collectives, somebody_computes, cycle:
        why = find(waits)
        if why:
            return why
    return ""


def awaited_rows(row, rows):
    """The rows that could let this one go on: the same thread of the ranks it waits for."""
    if row.kind == "work":
        return [r for r in rows if r.rank == row.rank and r.thread != row.thread and not r.idle]
    peers = row.peers() or [r for r in row.members if r != row.rank]
    found = [r for p in peers for r in rows if r.rank == p and r.thread == row.thread]
    return [r for r in found if row.peers() or (r.kind, r.op, r.number) !=
            (row.kind, row.op, row.number)]                # all wait in the same split, or exchange


def somebody_ended(waits):
    for row, other in waits:
        if other.end:
            return f"rank {row.rank} waits for rank {other.rank}, which {other.end}"
    return ""


def different_collectives(waits):
    """Two ranks of one group whose n-th collective is not the same."""
    for a, b in waits:
        if a.number and a.number == b.number and a.members == b.members and a.op != b.op:
            return mismatch(a, b)
    return ""


def mismatch(a, b):
    return (f"rank {a.rank} is in {call(a)} ({a.line}), but rank {b.rank} is in {call(b)} "
            f"({b.line}): all ranks of a group must make the same calls in the same order")


def somebody_computes(waits):
    for row, other in waits:
        if not other.waits:
            return f"rank {row.rank} waits for rank {other.rank}, which {pastime(other)}"
    return ""


def pastime(row):
    """What a thread does that waits for nobody, in words."""
    if row.idle:
        return "has nothing to do there"
    if row.silence:
        return f"has given no sign of life for {row.silence:.0f} s"
    return f"{row.work or 'computes'} at {row.line}"


def cycle(waits):
    """Follow who waits for whom until a row comes up again."""
    after = {}
    for row, other in waits:
        after.setdefault(id(row), (row, other))
    for start, _ in waits:
        path = []
        while id(start) in after and start not in path:
            path.append(start)
            start = after[id(start)][1]
        if start in path:
            return cycle_text(path[path.index(start):])
    return ""


def cycle_text(ring):
    """Say what kind of cycle it is."""
    path = " -> ".join(f"rank {r.rank}" for r in [*ring, ring[0]])
    kinds = {r.kind for r in ring}
    if kinds <= {"send", "isend"}:
        return (f"all send first, in a cycle ({path}), and nobody receives. This hangs only for "
                "large messages, since MPI buffers small ones: use sendrecv or shift")
    if kinds <= {"recv", "irecv"} and len({(r.op, r.number) for r in ring}) == 1:
        return f"a cycle of receives ({path}): each waits for the next, and nobody sends"
    for a, b in zip(ring, [*ring[1:], ring[0]]):
        if any(r.kind in ("split", "close") for r in ring) or (a.op, a.number, a.group) != (
                b.op, b.number, b.group):
            return mismatch(a, b)
    return f"a cycle ({path}): each waits for the next"
