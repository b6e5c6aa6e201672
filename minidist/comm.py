"""A group of ranks that exchange arrays: checked, counted, and never silent about a mistake.

    comm = comm.world()                        ranks are MPI processes
    comm.run_threads(4, fn)                    ranks are threads of this process: fn(comm) on each

Everything above is written with seven messages: send recv sendrecv shift isend irecv barrier.
"""
import queue
import threading
import time
import zlib
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from minidist import threads
from minidist.buffers import incoming, outgoing
from minidist.threads import Deadlock                                           # noqa: F401


@dataclass
class Count:
    """What was sent under one label."""
    calls: int = 0
    messages: int = 0
    bytes: int = 0


@dataclass
class Event:
    """One message of the log; times in seconds."""
    rank: int
    op: str
    group: str
    peer: int
    nbytes: int
    start: float
    end: float


class Label:
    """`with` this, messages are counted under its name; the outermost one wins."""

    def __init__(self, comm, name, collective):
        self.comm, self.name, self.collective = comm, name, collective
        self.count = comm.counts.setdefault(name, Count())
        self.code = (1 + zlib.crc32(name.encode()) % 31) << 5 if collective else 0

    def __enter__(self):
        comm = self.comm
        if comm._label is None:
            comm._label = self
            self.count.calls += 1
        comm._depth += 1
        if self.collective:
            if comm._collectives == 0:
                comm._sequence += 1
                comm._tag, comm._wire = self.code + comm._sequence % 32, comm._wires[1]
            comm._collectives += 1

    def __exit__(self, *error):
        comm = self.comm
        comm._depth -= 1
        if comm._depth == 0:
            comm._label = None
        if self.collective:
            comm._collectives -= 1
            if comm._collectives == 0:
                comm._tag, comm._wire = 0, comm._wires[0]


class Comm:
    """A group of ranks.  rank: mine; size: how many; name: for reports and the mesh"""

    def __init__(self, wire, name="world"):
        self.name, self.rank, self.size = name, wire.rank, wire.size
        self.counts, self._labels, self._family = {}, {}, [self]
        self._wires = wire, wire.dup()             # messages; messages inside a collective
        self._wire, self._tag, self._sequence = wire, 0, 0
        self._label, self._depth, self._collectives = None, 0, 0
        self._events, self._buffers, self._status = None, {}, wire.status

    def __repr__(self):
        return f"Comm({self.name!r}, rank {self.rank} of {self.size})"

    # -- messages -------------------------------------------------------------------------

    def send(self, x, to):
        """Send x; returns when x may be overwritten."""
        tag = self._out(x, to)
        with self._doing("send", to, None, x.nbytes):
            self._wire.send(x, to, tag)

    def recv(self, into, source):
        """Receive into a buffer of exactly the message's size and type; return it."""
        tag = self._in(into, source)
        with self._doing("recv", None, source, into.nbytes):
            came = self._wire.recv(into, source)
        self._compare(came, tag, into, source)
        return into

    def sendrecv(self, x, to, into, source):
        """Send x and receive into, at the same time: never waits for its own message."""
        tag, expected = self._out(x, to), self._in(into, source)
        with self._doing("sendrecv", to, source, x.nbytes):
            came = self._wire.sendrecv(x, to, tag, into, source)
        self._compare(came, expected, into, source)
        return into

    def shift(self, x, into):
        """Send x to the right neighbour, receive into from the left; return into."""
        return self.sendrecv(x, (self.rank + 1) % self.size, into, (self.rank - 1) % self.size)

    def isend(self, x, to):
        """Start to send x, which must stay as it is until the Request is waited for."""
        tag = self._out(x, to)
        with self._doing("isend", to, None, x.nbytes):
            return Request(self, self._wire.isend(x, to, tag))

    def irecv(self, into, source):
        """Start to receive; into is filled when the Request has been waited for."""
        tag = self._in(into, source)
        return Request(self, self._wire.irecv(into, source), into, source, tag)

    def barrier(self):
        """Wait until every rank is here.  log2(p) empty messages"""
        empty, step = np.empty(0, "u1"), 1
        with self.operation("barrier"):
            while step < self.size:
                self.sendrecv(empty, (self.rank + step) % self.size,
                              empty, (self.rank - step) % self.size)
                step *= 2

    # -- groups ---------------------------------------------------------------------------

    def split(self, color, key=None, name=None):
        """Form groups of equal color, ordered by key.  Collective; None where color is None"""
        wire = self._wires[0].split(color, self.rank if key is None else key)
        return None if wire is None else self._child(wire, name or f"{self.name}/{color}")

    def node(self):
        """Form the group of ranks on my machine.  Collective"""
        return self._child(self._wires[0].node(), "node")

    def stream(self):
        """Start a background stream: its own thread and communicator.  Collective"""
        return Stream(self)

    def _child(self, wire, name):
        child = Comm(wire, name)
        child._events = self._events
        self._family.append(child)
        return child

    # -- counting -------------------------------------------------------------------------

    def operation(self, name, detail=None):
        """`with` this, messages belong to one collective.  Every rank enters the same ones"""
        return self._labelled(name, True)

    def label(self, name):
        """`with` this, messages are counted under name; ranks may differ."""
        return self._labelled(name, False)

    def _labelled(self, name, collective):
        key = name, collective
        if key not in self._labels:
            self._labels[key] = Label(self, name, collective)
        return self._labels[key]

    @contextmanager
    def counting(self):
        """Count what this rank sends inside the block, over this group and those made from it."""
        before = {id(c): dict(self._snapshot(c)) for c in self._everyone()}
        total = Counted()
        try:
            yield total
        finally:
            for comm in self._everyone():
                old = before.get(id(comm), {})
                for label, (calls, messages, nbytes) in self._snapshot(comm):
                    was = old.get(label, (0, 0, 0))
                    total.add(comm.name, label, calls - was[0], messages - was[1], nbytes - was[2])

    @staticmethod
    def _snapshot(comm):
        return [(k, (c.calls, c.messages, c.bytes)) for k, c in comm.counts.items()]

    def _everyone(self):
        for comm in self._family:
            yield comm
            if comm is not self:
                yield from list(comm._everyone())[1:]

    @contextmanager
    def recording(self):
        """Log every message of the block, over this group and those made from it."""
        events = []
        for comm in self._everyone():
            comm._events = events
        try:
            yield events
        finally:
            for comm in self._everyone():
                comm._events = None

    def scratch(self, n, dtype, slot=0):
        """A kept buffer of n elements, for data that nobody needs after the next call."""
        nbytes = n * np.dtype(dtype).itemsize
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.size < nbytes:
            buffer = self._buffers[slot] = np.empty(nbytes, "u1")
        return buffer[:nbytes].view(dtype)

    # -- one message ----------------------------------------------------------------------

    def _out(self, x, to):
        if not 0 <= to < self.size:
            raise ValueError(self._no_such(to, "send to"))
        return self._tag + (outgoing(x) << 10)

    def _in(self, into, source):
        if not 0 <= source < self.size:
            raise ValueError(self._no_such(source, "receive from"))
        return self._tag + (incoming(into) << 10)

    def _no_such(self, peer, what):
        return (f"rank {self.rank} cannot {what} rank {peer}: "
                f"group '{self.name}' has ranks 0 to {self.size - 1}")

    @contextmanager
    def _doing(self, kind, to, source, nbytes):
        name = self._label.name if self._label else kind
        count = self.counts.setdefault(name, Count())
        if not self._label:
            count.calls += 1
        if to is not None:
            count.messages += 1
            count.bytes += nbytes
        self._status.now = name, kind, self.name, to, source, nbytes
        start = time.perf_counter()
        yield
        self._status.now = None
        if self._events is not None:
            self._events.append(Event(self.rank, name, self.name, source if to is None else to,
                                      nbytes, start, time.perf_counter()))

    def _compare(self, came, expected, into, source):
        if came != (expected, into.nbytes):
            raise ValueError(f"rank {self.rank} expected {into.size} {into.dtype} from rank {source} "
                             f"(tag {expected}), got {came[1]} bytes (tag {came[0]})")


class Counted:
    """What counting() found."""

    def __init__(self):
        self.calls = self.messages = self.bytes = 0
        self.by_label, self.by_group = {}, {}

    def add(self, group, label, calls, messages, nbytes):
        if calls or messages:
            for count in (self, self.by_label.setdefault(label, Count()),
                          self.by_group.setdefault(group, Count())):
                count.calls += calls
                count.messages += messages
                count.bytes += nbytes


class Request:
    """A started send or receive."""

    def __init__(self, comm, handle, into=None, source=None, tag=None):
        self.comm, self.handle, self.into, self.source, self.tag = comm, handle, into, source, tag

    def wait(self):
        """Block until done; a receive returns its buffer."""
        if self.handle is not None:
            comm, into = self.comm, self.into
            comm._status.now = ("wait", "wait", comm.name, None, self.source,
                                0 if into is None else into.nbytes)
            came, self.handle = self.handle.wait(), None
            comm._status.now = None
            if into is not None:
                comm._compare(came, self.tag, into, self.source)
        return self.into


class Stream:
    """A background thread that runs functions in order, on a communicator of its own."""

    def __init__(self, comm):
        self.comm = comm._child(comm._wires[0].dup(), comm.name)
        self.queue = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, fn, *args):
        """Run fn(*args, comm=stream.comm) after everything submitted before."""
        work = Work(fn, args)
        self.queue.put(work)
        return work

    def _run(self):
        while True:
            work = self.queue.get()
            try:
                work.result = work.fn(*work.args, comm=self.comm)
            except BaseException as error:
                work.error = error
            work.done.set()


class Work:
    """Something submitted to a Stream."""

    def __init__(self, fn, args):
        self.fn, self.args, self.result, self.error = fn, args, None, None
        self.done = threading.Event()

    def wait(self):
        """Block until it has run; return its result or raise its error."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self.result


def world():
    """The group of all MPI processes of this job."""
    global _world
    if _world is None:
        from minidist import processes
        _world = Comm(processes.world())
    return _world


_world = None


def solo():
    """A group of one rank, which needs no MPI."""
    world = threads.World(1)
    return Comm(threads.ThreadWire(world, world.actor(0), 0, 0, range(1)), "solo")


def run_threads(n, fn, *args, sync=False, timeout=None, link=None):
    """Call fn(comm, *args) on n thread ranks; return the results in rank order."""
    return threads.run(n, fn, args, sync, timeout, Comm)
