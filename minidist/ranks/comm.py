"""A group of ranks that exchange arrays: checked, counted, never silent about a mistake.

    world()                     all processes of this MPI job        mpirun -n 4 python ...
    run_threads(4, fn)          four threads of this process, fn(comm) on each: needs no MPI
    solo()                      one rank alone

                to the right: shift                       send  recv  sendrecv
        0 ---> 1 ---> 2 ---> 3 ---> 0                     isend irecv exchange barrier

Everything above is written with these calls. A message carries, in its tag, its type, the
collective it belongs to and seven bits of its arguments, and the receiver compares. What does not
fit or match is an error that names both sides: other arguments of one collective 126 times in 127,
and always with MINIDIST_CHECK=1.  Price: at most 3 us per message above the bare mpi4py call.
"""
import numpy as np

from minidist import BadInput
from minidist.ranks import agree, environment, link, safety, threads
from minidist.ranks.buffers import CODES, Scratch, incoming, outgoing, refuse_overlaps, unlike
from minidist.ranks.counting import Counting
from minidist.ranks.stream import Stream, Worker
from minidist.ranks.threads import Deadlock                                        # noqa: F401
from minidist.ranks.wire import Closed, Closing, Request


class Comm(Counting, Closing):
    """A group of ranks.  rank: mine; size: how many; name: for reports; axes: of the mesh

    With `with`, it is closed at the end of the block."""

    def __init__(self, wires, name="world", parent=None, axes=()):
        super().__init__()
        self.name, self.rank, self.size = name, wires[0].rank, wires[0].size
        self.ranks, self._peers = wires[0].ranks, frozenset(range(self.size))   # in the world; here
        self.axes = tuple(axes)                           # () for a group that is no mesh axis
        # Two communicators, so that a message sent outside of collectives and one sent inside
        # never pair up, in whatever order the ranks come to them.  _wire: the one in use now.
        self.plain, self.collective = wires
        self._digests = 127 if self.plain.bare.wide_tags else 0
        self._wire, self._status = self.plain, self.plain.status
        self.scratch, self._link, self._children = Scratch(), None, []
        self._sent = set()                                # requests that nobody has waited for
        self.closed, self._parent, self._stream, self._worker = False, parent, None, None
        self._root = self if parent is None else parent._root
        self.check = environment.check() if parent is None else parent.check
        if parent is not None:
            self._events = parent._events
            self._use(parent._link)
            parent._children.append(self)

    def __repr__(self):
        return f"Comm({self.name!r}, rank {self.rank} of {self.size})"

    # -- messages -------------------------------------------------------------------------

    def send(self, x, to):
        """Send x; returns when x may be overwritten, which may be before it has arrived."""
        tag = self._out(x, to)
        started = self._begin("send", to, None, x.nbytes)
        try:
            self._wire.send(x, to, tag)
        finally:
            self._end(started)

    def recv(self, into, source):
        """Receive into a buffer of exactly the message's size and type; return it."""
        tag = self._in(into, source)
        started = self._begin("recv", None, source, 0, into.nbytes)
        try:
            came = self._wire.recv(into, source)
        finally:
            self._end(started)
        if came != (tag, into.nbytes):
            raise unlike(self, came, tag, into, source)
        return into

    def sendrecv(self, x, to, into, source):
        """Send x and receive into at the same time, so that a cycle cannot block; return into."""
        # _out, _in, _begin and _end are written out here, since every collective spends its time in
        # this call: 0.8 us of Python instead of the 1.2 us that it takes with their calls.
        try:
            tag = expected = self._tag + CODES[x.dtype]
            if into.dtype is not x.dtype:
                expected = self._tag + CODES[into.dtype]
            fine = (x.flags.c_contiguous and into.flags.carray
                    and to in self._peers and source in self._peers
                    and (self._tag or x is not into and x.base is into.base is None
                         or not np.may_share_memory(x, into)))        # collectives never overlap
        except (AttributeError, KeyError):
            fine = False
        if not fine:
            self._out(x, to), self._in(into, source)                  # one of them raises, or:
            refuse_overlaps([(x, to, into, source)])
        nbytes, status = x.nbytes, self._status
        count = self._count or self._unlabelled("sendrecv")
        count.messages += 1
        count.bytes += nbytes
        started = None if self._events is None else self._starts(
            "sendrecv", to, source, nbytes, into.nbytes)
        status.now = self, "sendrecv", to, source, nbytes
        try:
            came = self._wire.sendrecv(x, to, tag, into, source)
        finally:
            status.now = None
            if started is not None:
                self._log(started)
        if came != (expected, into.nbytes):
            raise unlike(self, came, expected, into, source)
        return into

    def shift(self, x, into):
        """Send x to the right neighbour, receive into from the left one; return into."""
        return self.sendrecv(x, (self.rank + 1) % self.size, into, (self.rank - 1) % self.size)

    def isend(self, x, to):
        """Start to send x, which must stay as it is until the Request has been waited for."""
        tag = self._out(x, to)
        started = self._begin("isend", to, None, x.nbytes)
        try:
            request = Request(self, started, self._wire.isend(x, to, tag), "isend", to, None, x)
        finally:
            self._status.now = None
        # A Request that the caller drops must not take its array along while that is on its way.
        if self._sent:
            self._sent = {r for r in self._sent if not r.ready()}
        self._sent.add(request)
        return request

    def irecv(self, into, source):
        """Start to receive; into is filled once the Request has been waited for."""
        tag = self._in(into, source)
        started = self._begin("irecv", None, source, 0, into.nbytes)
        self._status.now = None
        handle = self._wire.irecv(into, source)
        return Request(self, started, handle, "irecv", None, source, into, tag)

    def exchange(self, moves):
        """Make several sendrecvs at once: one wait instead of many.  (x, to, into, source) each"""
        if len(moves) == 1:
            self.sendrecv(*moves[0])
            return
        tags, expected, out, incoming = [], [], 0, 0
        self._tag or refuse_overlaps(moves)                           # those of ours have none
        for x, to, into, source in moves:
            tags.append(self._out(x, to))
            expected.append((self._in(into, source), into.nbytes))
            out += x.nbytes
            incoming += into.nbytes
        count = self._count or self._unlabelled("exchange")
        count.messages += len(moves)
        count.bytes += out
        started = [] if self._events is None else [
            self._starts("exchange", to, source, x.nbytes, into.nbytes)
            for x, to, into, source in moves]
        self._status.now = self, "exchange", None, None, out
        try:
            came = self._wire.exchange(moves, tags, out + incoming)
        finally:
            self._status.now = None
            for entry in started:
                self._log(entry)
        if came != expected:
            k = [a != b for a, b in zip(came, expected)].index(True)
            raise unlike(self, came[k], expected[k][0], *moves[k][2:])

    def barrier(self):
        """Wait until every rank is here.  log2(p) rounds of empty messages"""
        empty, step = np.empty(0, "u1"), 1
        with self.operation("barrier"):
            while step < self.size:
                self.sendrecv(empty, (self.rank + step) % self.size,
                              empty, (self.rank - step) % self.size)
                step *= 2

    def _out(self, x, to):
        """The tag under which x may go to rank `to`, or an error that says what is wrong."""
        if to not in self._peers:
            raise self._no_such(to, "send to")
        return self._tag + outgoing(x)

    def _in(self, into, source):
        """The tag that a message for `into` must carry, or an error that says what is wrong."""
        if source not in self._peers:
            raise self._no_such(source, "receive from")
        return self._tag + incoming(into)

    def _no_such(self, peer, what):
        return ValueError(f"rank {self.rank} cannot {what} rank {peer}: "
                          f"group {self.name} has ranks 0 to {self.size - 1}")

    # -- collectives ----------------------------------------------------------------------

    def _same_call(self):
        agree.same_call(self, self.collective.bare)

    def current(self):
        """What this group does now, for reports -> (name, number of the collective or 0, detail)"""
        if self._operation is not None:
            return self._operation.name, self._sequence, self._detail
        return (self._label.name if self._label else ""), 0, None

    # -- groups, streams, links -----------------------------------------------------------

    def split(self, color, key=None, name=None, axes=()):
        """Form groups of equal color, ordered by key.  Collective; None where color is None

        axes: the names of the mesh axes along which the members of a group lie.
        """
        key = self.rank if key is None else key
        wires = self._form(lambda wire: wire.split(color, key))
        return wires and Comm(wires, name or f"{self.name}[{color}]", self, axes)

    def node(self):
        """Form the group of the ranks on my machine.  Collective"""
        return Comm(self._form(lambda wire: wire.node()), "node", self)

    def stream(self):
        """Make a background stream: a communicator for this rank's second thread.  Collective"""
        wires = self._form(lambda wire: wire.dup())
        root = self._root
        root._worker = root._worker or Worker(root.plain.bare)
        wires = [wire.beside(root._worker.wire) for wire in wires]
        return Stream(Comm(wires, self.name, self, self.axes), self.plain.bare, root)

    def _form(self, make):
        """Make the two wires of a new group, or None."""
        def both():
            wire = make(self.plain.bare)
            return wire and (wire, wire.dup())
        return self._together("split", both)

    def _together(self, kind, act):
        """Do what every rank does; one that waits here shows in reports."""
        self._status.now = self, kind, None, None, 0
        try:
            return act()
        finally:
            self._status.now = None

    def link(self, latency=0.0, bandwidth=float("inf")):
        """Put a slow link under this group and those made from it.  Seconds, bytes per second

        Collective. In effect from the call on; `with comm.link(...):` ends it with the block.
        """
        return link.Linked(self, link.Link(latency, bandwidth))

    def close(self):
        """Give the communicators back, of this group and of all that was made from it.  Collective

        A second call does nothing; a message after it is refused.
        """
        if self.closed:
            return
        if self._stream is not None and not self._stream.closed:
            self._stream.close()                          # which calls this on its own thread
            return
        for child in list(self._children):
            child.close()
        self._together("close", lambda: (self.plain.bare.close(), self.collective.bare.close()))
        self.closed, self._link, self.scratch = True, None, Scratch()
        self.plain = self.collective = self._wire = Closed(self.name)
        if self._parent is not None:
            self._hand_over(self._parent)

    def _use(self, port):
        self._link = port
        self.plain, self.collective = link.over(self.plain, port), link.over(self.collective, port)
        self._wire = self.plain if self._operation is None else self.collective


# -- where groups come from ---------------------------------------------------------------------

def world():
    """The group of all processes of this MPI job.  The first call installs the safety net."""
    global _world
    if _world is None:
        _world = join()
    return _world


_world = None


def join():
    """Connect to the other processes of the job; one alone, without an MPI, is a group of one."""
    safety.speak_plainly()
    try:
        from minidist.ranks import processes
    except (ImportError, RuntimeError) as error:            # no mpi4py; mpi4py finds no library
        if environment.launched():
            raise BadInput(environment.lacking() or f"this Python has no mpi4py that works "
                           f"({error}): pip install mpi4py mpich") from None
        return solo()
    wire = processes.start()
    safety.install(wire)
    return Comm((wire, wire.dup()))


def solo():
    """A group of one rank, which needs no MPI."""
    world = threads.World(1)
    wire = threads.ThreadWire(world, world.actor(0), 0, 0, range(1))
    return Comm((wire, wire.dup()), "solo")


def run_threads(n, fn, *args, sync=False, timeout=None, link=None):
    """Call fn(comm, *args) on n ranks that are threads; return the results in rank order.

    The first rank's error is raised here; a deadlock at once, with who waits for whom.
    sync: every send waits for its receive.  timeout: seconds.  link: (latency, bandwidth).
    """
    if n < 1:
        raise BadInput(f"run_threads({n}, ...) runs nothing: give 1 rank or more")

    def body(wire):
        comm = Comm((wire, wire.dup()))
        if link is not None:
            comm.link(*link)
        return fn(comm, *args)
    return threads.run(n, body, sync, timeout)
