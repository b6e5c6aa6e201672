"""Ranks as threads of one process: no MPI needed, and a deadlock is known the moment it happens.

A message goes into the mailbox (channel, receiver, sender), which keeps two queues, as MPI does:

    letters   sent, and nobody has asked yet        posts   asked for, and nobody has sent yet

Every thread either runs or waits for exactly one letter or post. When the last running one begins
to wait, nobody is left who could wake the others: that is a deadlock, exact and at once.
"""
import threading
from collections import defaultdict, deque

from minidist import watch


class Deadlock(RuntimeError):
    """Ranks wait for each other and none can go on."""


class World:
    """What the ranks of one process share: mailboxes, and how many threads still run."""

    def __init__(self, size, sync=False):
        self.size, self.sync = size, sync
        self.lock = threading.Lock()
        self.letters, self.posts = defaultdict(deque), defaultdict(deque)
        self.actors, self.running = [], 0
        self.channels, self.error = 0, None

    def actor(self, rank):
        """Register one more thread, as running."""
        with self.lock:
            self.actors.append(Actor(rank))
            self.running += 1
            return self.actors[-1]

    def wait(self, actor, thing):
        """Let actor wait until thing is done.  The caller holds the lock"""
        if self.error is None and not thing.done:
            thing.waiter = actor
            self.rest(actor)
            self.lock.release()
            actor.wake.acquire()
            self.lock.acquire()
        if not thing.done:
            raise type(self.error)(*self.error.args)

    def rest(self, actor):
        """Count one running thread less; the last one to rest finds the deadlock."""
        self.running -= 1
        actor.running = False
        if self.running == 0 and any(a.status.now for a in self.actors):
            self.fail(Deadlock(watch.explain([a.row() for a in self.actors])))

    def finish(self, thing):
        """Mark thing as done and wake who waits for it.  The caller holds the lock"""
        thing.done = True
        if thing.waiter:
            self.rouse(thing.waiter)

    def rouse(self, actor):
        if not actor.running:
            self.running += 1
            actor.running = True
            actor.wake.release()

    def fail(self, error):
        """End the world: whoever waits now, or waits next, raises error.  Caller holds the lock"""
        if self.error is None:
            self.error = error
            for actor in self.actors:
                if actor.status.now:
                    self.rouse(actor)

    def leave(self, actor, error=None):
        """Let a thread go: its rank has returned, or raised error."""
        with self.lock:
            actor.left, actor.status.now = True, None
            if error is not None:
                self.fail(Stopped(f"rank {actor.rank} failed: {error!r}"))
            self.rest(actor)


class Stopped(RuntimeError):
    """Another rank has failed, so this one cannot go on."""


class Actor:
    """One thread of one rank: what it does now, and the bell that wakes it."""

    def __init__(self, rank):
        self.rank, self.status = rank, watch.Status()
        self.running, self.left = True, False
        self.wake = threading.Lock()
        self.wake.acquire()
        self.thread = threading.get_ident()

    def row(self):
        return watch.Row(self.rank, watch.describe(self.status.now), watch.line_of(self.thread),
                         self.left)


class Letter:
    """A message on its way, and (in the other queue) a request for one."""

    def __init__(self, data, tag=None, nbytes=None):
        self.data, self.tag, self.nbytes = data, tag, nbytes
        self.done, self.waiter = False, None


class Handle:
    """A started send or receive of a thread rank."""

    def __init__(self, wire, letter):
        self.wire, self.letter = wire, letter

    def wait(self):
        """Block until it is done; a receive returns what came: (tag, nbytes)."""
        world = self.wire.world
        with world.lock:
            world.wait(self.wire.actor, self.letter)
        return self.letter.tag, self.letter.nbytes


class ThreadWire:
    """One rank's end of a channel between the threads `members` (world ranks)."""

    def __init__(self, world, actor, channel, rank, members):
        self.world, self.actor, self.channel = world, actor, channel
        self.rank, self.size, self.members = rank, len(members), members
        self.status = actor.status

    def isend(self, x, to, tag):
        world, box = self.world, (self.channel, to, self.rank)
        with world.lock:
            if world.posts[box]:
                letter = Letter(x, tag, x.nbytes)
                deliver(world, letter, world.posts[box].popleft())
            else:
                letter = Letter(x if world.sync else x.copy(), tag, x.nbytes)
                world.letters[box].append(letter)
            letter.done = letter.done or not world.sync
        return Handle(self, letter)

    def irecv(self, into, source):
        world, box = self.world, (self.channel, self.rank, source)
        with world.lock:
            post = Letter(into)
            if world.letters[box]:
                deliver(world, world.letters[box].popleft(), post)
            else:
                world.posts[box].append(post)
        return Handle(self, post)

    def send(self, x, to, tag):
        self.isend(x, to, tag).wait()

    def recv(self, into, source):
        return self.irecv(into, source).wait()

    def sendrecv(self, x, to, tag, into, source):
        sent = self.isend(x, to, tag)
        came = self.irecv(into, source).wait()
        sent.wait()
        return came

    def split(self, color, key):
        """Form groups of equal color, ordered by (key, rank); None for color None."""
        everyone = self._allgather((color, key, self.rank))
        if self.rank == 0:
            with self.world.lock:
                base = self.world.channels
                self.world.channels += self.size
        base = self._allgather(base if self.rank == 0 else None)[0]
        if color is None:
            return None
        mine = [r for c, k, r in sorted((e for e in everyone if e[0] == color), key=lambda e: e[1:])]
        channel = base + 1 + min(mine)
        return ThreadWire(self.world, self.actor, channel, mine.index(self.rank),
                          [self.members[r] for r in mine])

    def dup(self, actor=None):
        wire = self.split(0, self.rank)
        if actor:
            wire.actor, wire.status = actor, actor.status
        return wire

    def node(self):
        return self.split(0, self.rank)

    def _allgather(self, item):
        """Exchange small Python objects with every rank, through mailboxes of their own."""
        channel, self.channel = self.channel, (self.channel, "setup")
        try:
            for r in range(self.size):
                self.isend(Parcel(item), r, 0)
            parcels = [Parcel() for r in range(self.size)]
            for r in range(self.size):
                self.recv(parcels[r], r)
            return [p.item for p in parcels]
        finally:
            self.channel = channel


class Parcel:
    """A Python object that travels like an array."""
    nbytes = 0

    def __init__(self, item=None):
        self.item = item

    def copy(self):
        return self

    def __setitem__(self, key, parcel):
        self.item = parcel.item


def deliver(world, letter, post):
    """Put a letter into the buffer that waits for it; a wrong size is left for the receiver to refuse."""
    post.tag, post.nbytes = letter.tag, letter.nbytes
    if letter.nbytes == post.data.nbytes:
        copy(letter.data, post.data)
    letter.data = post.data = None
    world.finish(letter)
    world.finish(post)


def copy(x, into):
    if isinstance(x, Parcel):
        into[...] = x
    elif x.nbytes:
        into.reshape(-1).view("u1")[:] = x.reshape(-1).view("u1")


def run(n, fn, args, sync, timeout, make):
    """Call fn(make(wire), *args) on n threads; return the results in rank order."""
    world = World(n, sync)
    results, errors = [None] * n, [None] * n

    def body(rank):
        actor = world.actors[rank]
        actor.thread = threading.get_ident()
        try:
            results[rank] = fn(make(ThreadWire(world, actor, 0, rank, range(n))), *args)
        except BaseException as error:
            errors[rank] = error
        world.leave(actor, errors[rank])

    for rank in range(n):
        world.actor(rank)
    threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        if thread.is_alive():
            with world.lock:
                world.fail(TimeoutError("after %g s:\n%s" % (timeout, watch.explain(
                    [a.row() for a in world.actors]))))
            raise world.error
    failed = [e for e in errors if e is not None]
    for error in [e for e in failed if not isinstance(e, Stopped)] + failed:
        raise error
    return results
