"""What carries the messages of a group: the one contract of MPI processes, threads and slow links.

    Comm          checks and counts an array, and compares what came with what was expected
     |
    Wire          moves bytes with a tag: MPIWire (processes), ThreadWire (threads), and
                  SlowWire (link), which lies over one of the other two and delays its messages
"""
from minidist.ranks.buffers import unlike


class Wire:
    """One rank's end of the messages of a group.  Every wire fills in:

    rank size ranks                     my rank, how many, and all as ranks of the world
    isend(x, to, tag)                   -> handle: ready(), wait()
    irecv(into, source)                 -> handle: ready(), wait() -> (tag, nbytes) of what came

    and those that lie on nothing else, for setting up (a row of the first four is collective):

    split(color, key) node() dup()      -> the wire of a new group, None for color None
    gather(item)                        -> everyone's small Python object, in rank order
    close()                             give back what the wire holds
    status                              what the thread that uses this wire does, for reports
    thread(name, end)                   the same group for a new thread of this rank
    beside(other)                       the same group for the thread of another wire
    leave()                             the thread that uses this wire ends
    queue()                             hands items to the thread that uses this wire: put, get
    """

    wide_tags = True                    # may a tag have 22 bits, not only the 15 of every MPI?

    @property
    def bare(self):
        """The wire without a slow link over it: what new groups are made from."""
        return self

    def send(self, x, to, tag):
        self.isend(x, to, tag).wait()

    def recv(self, into, source):
        return self.irecv(into, source).wait()

    def sendrecv(self, x, to, tag, into, source):
        sent = self.isend(x, to, tag)
        came = self.recv(into, source)
        sent.wait()
        return came

    def exchange(self, moves, tags, nbytes):
        """Several sendrecvs at once, of so many bytes in all -> what came with each"""
        coming = [self.irecv(into, source) for _, _, into, source in moves]
        going = [self.isend(x, to, tag) for (x, to, _, _), tag in zip(moves, tags)]
        came = [handle.wait() for handle in coming]
        for handle in going:
            handle.wait()
        return came


class Closing:
    """What `with` closes at the end of the block, by a close() that every rank calls."""

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        if kind is None:                           # else the others may never come to close
            self.close()


class Closed:
    """The wire of a group that has been closed: whatever is asked of it is refused."""

    def __init__(self, group):
        self._group = group

    def __getattr__(self, name):
        raise ValueError(f"group {self._group} is closed: no message goes through it any more, "
                         "and nothing is made from it")


class Request:
    """A started send or receive; it keeps the array alive."""

    def __init__(self, comm, started, handle, kind, to, source, x, tag=None):
        self.comm, self.started, self.handle, self.x, self.tag = comm, started, handle, x, tag
        self.now = comm, kind, to, source, x.nbytes

    def ready(self):
        """Would wait() return at once?"""
        return self.handle is None or self.handle.ready()

    def wait(self):
        """Block until it is done; return the array: of a receive, filled."""
        if self.handle is None:
            return self.x
        comm, handle, self.handle = self.comm, self.handle, None
        comm._sent.discard(self)
        comm._status.now = self.now
        try:
            came = handle.wait()
        finally:
            comm._end(self.started)
        if self.tag is not None and came != (self.tag, self.x.nbytes):
            raise unlike(comm, came, self.tag, self.x, self.now[3])
        return self.x
