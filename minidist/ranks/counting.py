"""What a rank has sent, by label: the numbers that `cost` predicts.

    with comm.operation("all_reduce"): ...   messages of one collective call, the same on every rank
    with comm.label("pipeline"): ...         messages of any kind, counted under one name
    with comm.counting() as c: ...           c.calls c.messages c.bytes c.by_label c.by_group
    with comm.recording() as events: ...     one Event per message and end

Bytes are payload bytes *sent*. Of nested labels the outermost wins, so a collective made of two
others counts as one; messages without a label count under the name of their call, such as "send".
"""
import time
import zlib
from contextlib import contextmanager
from dataclasses import dataclass

from minidist.ranks import report

# These have a code of their own in the tags of their messages; other names share the rest.
COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "scatter",
               "gather", "all_to_all", "barrier", "check"]


@dataclass(slots=True)
class Count:
    """What was sent under one label."""
    calls: int = 0
    messages: int = 0
    bytes: int = 0

    def add(self, calls, messages, nbytes):
        self.calls += calls
        self.messages += messages
        self.bytes += nbytes


class Total(Count):
    """What a counting() block found, and its parts by label and by name of the group."""

    def __init__(self):
        super().__init__()
        self.by_label, self.by_group = {}, {}

    def include(self, group, label, *numbers):
        if any(numbers):
            for count in (self, self.by_label.setdefault(label, Count()),
                          self.by_group.setdefault(group, Count())):
                count.add(*numbers)


@dataclass
class Event:
    """One end of a message.  rank, peer: in the world; start, end: seconds (perf_counter)"""
    rank: int
    op: str                    # the label
    group: str
    peer: int
    nbytes: int
    start: float
    end: float
    kind: str                  # "send" or "recv"; a sendrecv is one of each


class Label:
    """`with` this, messages of a Comm are counted under one name.

    code: what the tags of a collective's messages say; 0 for a label that is no collective.
    """
    __slots__ = "comm", "name", "code", "count", "detail", "digest"

    def __init__(self, comm, name, code):
        self.comm, self.name, self.code, self.detail, self.digest = comm, name, code, None, 0
        self.count = comm.counts.setdefault(name, Count())

    def __enter__(self):
        self.comm._enter(self)

    def __exit__(self, kind, error, trace):
        self.comm._leave()


def code_of(name):
    """The five bits that stand for an operation's name in a message tag: 1 to 31."""
    if name in COLLECTIVES:
        return 1 + COLLECTIVES.index(name)
    return 1 + len(COLLECTIVES) + zlib.crc32(name.encode()) % (31 - len(COLLECTIVES))


def add_up(*tables):
    """Add tables of numbers, entry by entry."""
    total = {}
    for table in tables:
        for key, numbers in table.items():
            total[key] = [a + b for a, b in zip(total.get(key, (0, 0, 0)), numbers)]
    return total


class Counting:
    """The half of Comm that labels, counts and records."""

    def __init__(self):
        self.counts, self._labels, self._events = {}, {}, None
        self._closed = {}                                       # counts of groups that are closed
        self._label = self._count = None                        # of the outermost block
        self._operation = self._detail = None                   # of the outermost collective
        self._sequence, self._tag = 0, 0
        self._depth = self._began = 0                           # open blocks, now and before it

    def operation(self, name, detail=None, digest=0):
        """`with` this, messages belong to one collective call, which every rank of the group makes.

        detail: what must be the same on every rank; compared first if MINIDIST_CHECK=1.  digest:
        seven bits of it, which travel in the tag of every message and are compared always.
        """
        label = self._labels.get(name)
        if label is None:
            label = self._labels[name] = Label(self, name, code_of(name) << 5)
        label.detail, label.digest = detail, digest
        return label

    def label(self, name):
        """`with` this, messages are counted under name; other ranks need not do the same."""
        label = self._labels.get((name,))
        if label is None:
            label = self._labels[name,] = Label(self, name, 0)
        return label

    def at_work(self, what):
        """`with` this, the other ranks may wait for what this one does, however long it takes.

        what: as a report shall say it, such as "trains the twin".
        """
        return report.at_work(self._status, what)

    def _enter(self, label):
        """Open a block.  The outermost one counts; the outermost collective gives the tag"""
        depth = self._depth
        self._depth = depth + 1
        if not depth:
            self._label, self._count = label, label.count
            label.count.calls += 1
        if label.code and self._operation is None:
            self._operation, self._detail, self._wire = label, label.detail, self.collective
            self._began = depth
            self._sequence = number = self._sequence + 1
            self._tag = label.code + number % 32 + ((label.digest & self._digests) << 15)
            if self.check:
                self._compare()

    def _compare(self):
        """MINIDIST_CHECK=1: raise if another rank makes another call."""
        try:
            self._same_call()
        except ValueError:
            self._leave()                          # `with` does not, for an error on the way in
            raise

    def _leave(self):
        """Close the innermost block."""
        self._depth = depth = self._depth - 1
        if depth == self._began and self._operation is not None:
            self._operation, self._wire, self._tag = None, self.plain, 0
        if not depth:
            self._label = self._count = None

    @contextmanager
    def counting(self):
        """Count what this rank sends inside the block, in this group and those made from it."""
        before, total = self._counted(), Total()
        try:
            yield total
        finally:
            for (group, name), now in self._counted().items():
                was = before.get((group, name), (0, 0, 0))
                total.include(group, name, *(a - b for a, b in zip(now, was)))

    def _counted(self):
        """What was ever sent here and in groups made from this one: {(group, label): numbers}"""
        mine = {(self.name, name): (count.calls, count.messages, count.bytes)
                for name, count in self.counts.items()}
        return add_up(mine, self._closed, *(child._counted() for child in self._children))

    def _everyone(self):
        """This group and all that were made from it."""
        return [self] + [c for child in self._children for c in child._everyone()]

    def _hand_over(self, parent):
        """Leave to the parent what outlives this group: its counts, and arrays on their way."""
        parent._children.remove(self)
        parent._closed = add_up(parent._closed, self._counted())
        parent._sent |= {request for request in self._sent if not request.ready()}

    @contextmanager
    def recording(self):
        """Log every message of the block, in this group and those made from it, as Events."""
        log = []
        for c in self._everyone():
            c._events = log
        try:
            yield log
        finally:
            for c in self._everyone():
                c._events = None

    # -- around every message -------------------------------------------------------------

    def _begin(self, kind, to, source, nbytes, incoming=0):
        """Count a message, and say what this thread is about to wait for -> for _end"""
        count = self._count or self._unlabelled(kind)
        if to is not None:
            count.messages += 1
            count.bytes += nbytes
        self._status.now = self, kind, to, source, nbytes or incoming
        if self._events is not None:
            return self._starts(kind, to, source, nbytes, incoming)

    def _end(self, started):
        self._status.now = None
        if started is not None:
            self._log(started)

    def _unlabelled(self, kind):
        """The Count of messages that no label claims."""
        count = self.counts.get(kind)
        if count is None:
            count = self.counts[kind] = Count()
        count.calls += 1
        return count

    def _starts(self, kind, to, source, nbytes, incoming):
        """What the log needs to know of a message before it begins."""
        name = self._label.name if self._label else kind
        return self._events, name, to, source, nbytes, incoming, time.perf_counter()

    def _log(self, started):
        events, op, to, source, nbytes, incoming, start = started
        end = time.perf_counter()
        for kind, peer, n in ("send", to, nbytes), ("recv", source, incoming):
            if peer is not None:
                mine, other = self.ranks[self.rank], self.ranks[peer]
                events.append(Event(mine, op, self.name, other, n, start, end, kind))
