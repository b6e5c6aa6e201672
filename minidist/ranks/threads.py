"""Ranks as threads of one process: no MPI needed, and a deadlock is known the moment it happens.

A message goes into the mailbox (channel, receiver, sender), which keeps two queues, as MPI does:

    letters   sent, and nobody has asked yet        posts   asked for, and nobody has sent yet

Every thread either runs or waits for one letter or post. When the last running one begins to wait,
nobody is left who could wake the others: that is a deadlock, exact and at once.
"""
import threading
import time
from collections import defaultdict, deque

import numpy as np

from minidist.ranks import environment, report, watch
from minidist.ranks.wire import Wire


class Stopped(RuntimeError):
    """Another rank has failed, so this one cannot go on."""


class Deadlock(Stopped):
    """Ranks wait for each other and none can go on."""


class World:
    """What the ranks of one process share: mailboxes, and how many threads still run."""

    def __init__(self, size, sync=False):
        self.size, self.sync = size, sync
        self.lock = threading.Lock()
        self.letters, self.posts = defaultdict(deque), defaultdict(deque)
        self.actors, self.running = [], 0
        self.channels, self.error = 0, None

    def actor(self, rank, name="main"):
        """Register one more thread, as running."""
        with self.lock:
            self.actors.append(Actor(rank, name))
            self.running += 1
            return self.actors[-1]

    def wait(self, actor, thing):
        """Let actor wait until thing is done.  The caller holds the lock"""
        if not thing.done and self.error is None:
            thing.waiter = actor
            self.rest(actor)
            self.lock.release()
            actor.bell.acquire()
            self.lock.acquire()
        if not thing.done:
            raise type(self.error)(*self.error.args)

    def rest(self, actor):
        """Count one running thread less; the last one to rest finds the deadlock."""
        self.running -= 1
        actor.running = False
        if self.running == 0 and any(a.status.now for a in self.actors):
            self.fail(Deadlock(self.story("deadlock: no rank can go on")))

    def finish(self, thing):
        """Mark thing as done and wake who waits for it.  The caller holds the lock"""
        thing.done = True
        if thing.waiter is not None:
            self.rouse(thing.waiter)

    def rouse(self, actor):
        if not actor.running:
            self.running += 1
            actor.running = True
            actor.bell.release()

    def fail(self, error):
        """End the world: whoever waits now, or waits next, raises error.  Caller holds the lock"""
        if self.error is None:
            self.error = error
            for actor in self.actors:
                self.rouse(actor)

    def leave(self, actor, error=None):
        """Let a rank go: it has returned, or raised error."""
        told = report.words(error, repr)
        with self.lock:
            actor.status.now = None
            actor.status.end = "has finished" if error is None else f"raised {told}"
            if error is not None:
                self.fail(Stopped(self.story(f"rank {actor.rank} raised {told}")))
            self.rest(actor)

    def retire(self, actor):
        """Let a thread go that is no rank's main one: no report shows it any more."""
        with self.lock:
            actor.status.now = None
            self.actors.remove(actor)
            self.rest(actor)

    def story(self, headline):
        return report.explain(headline, [report.row(a.rank, a.status) for a in self.actors])


class Actor:
    """One thread of one rank: what it does now, and the bell that wakes it."""

    def __init__(self, rank, name):
        self.rank, self.running, self.end = rank, True, None
        self.status = report.Status(threading.get_ident(), name)
        self.bell = threading.Lock()
        self.bell.acquire()


class Letter:
    """A message on its way, or a request for one."""

    def __init__(self, data=None, tag=None, nbytes=None):
        self.data, self.tag, self.nbytes = data, tag, nbytes
        self.done, self.waiter = False, None


class Handle:
    """A started send or receive of a thread rank."""

    def __init__(self, wire, letter):
        self.wire, self.letter = wire, letter

    def ready(self):
        return self.letter.done

    def wait(self):
        """Block until it is done; a receive returns what came: (tag, nbytes)."""
        world = self.wire.world
        with world.lock:
            world.wait(self.wire.actor, self.letter)
        return self.letter.tag, self.letter.nbytes


class ThreadWire(Wire):
    """One rank's end of a channel between threads.  ranks: its members, as ranks of the world"""

    def __init__(self, world, actor, channel, rank, ranks):
        self.world, self.actor, self.channel = world, actor, channel
        self.rank, self.size, self.ranks = rank, len(ranks), ranks
        self.status = actor.status

    def isend(self, x, to, tag):
        world, box = self.world, (self.channel, to, self.rank)
        letter = Letter(x, tag, x.nbytes)
        with world.lock:
            if world.posts[box]:
                deliver(world, letter, world.posts[box].popleft())
            else:
                letter.data = x if world.sync else x.copy()
                letter.done = not world.sync
                world.letters[box].append(letter)
        return Handle(self, letter)

    def irecv(self, into, source):
        world, box, post = self.world, (self.channel, self.rank, source), Letter(into)
        with world.lock:
            if world.letters[box]:
                deliver(world, world.letters[box].popleft(), post)
            else:
                world.posts[box].append(post)
        return Handle(self, post)

    # -- groups and streams -----------------------------------------------------------------

    def split(self, color, key):
        """Form groups of equal color, ordered by (key, rank); None for color None."""
        entries = self.gather((color, key, self.rank, self.fresh_channels()))
        if color is None:
            return None
        mine = [rank for _, rank in sorted((k, r) for c, k, r, _ in entries if c == color)]
        channel = entries[0][3] + min(mine)
        return ThreadWire(self.world, self.actor, channel, mine.index(self.rank),
                          [self.ranks[r] for r in mine])

    def fresh_channels(self):
        """Reserve one channel per rank (rank 0's are the ones that get used)."""
        with self.world.lock:
            self.world.channels += self.size
            return self.world.channels - self.size + 1

    def gather(self, item):
        """Exchange small Python objects with all ranks, in mailboxes of their own."""
        setup = ThreadWire(self.world, self.actor, ("setup", self.channel), self.rank, self.ranks)
        parcels = [np.empty(1, object) for _ in range(self.size)]
        mine = np.empty(1, object)
        mine[0] = item
        sent = [setup.isend(mine, r, 0) for r in range(self.size)]
        for r in range(self.size):
            setup.recv(parcels[r], r)
        for handle in sent:
            handle.wait()
        return [p[0] for p in parcels]

    def node(self):
        return self.split(0, self.rank)

    def dup(self):
        return self.split(0, self.rank)

    def thread(self, name, end):
        """The same channel for a new thread of this rank, which end() ends after the ranks."""
        actor = self.world.actor(self.ranks[self.rank], name)
        actor.end = end
        return ThreadWire(self.world, actor, self.channel, self.rank, self.ranks)

    def beside(self, other):
        """The same channel for the thread of another wire."""
        return ThreadWire(self.world, other.actor, self.channel, self.rank, self.ranks)

    def leave(self):
        """Say that the thread of this wire ends."""
        self.world.retire(self.actor)

    def close(self):
        """Throw the mailboxes of this rank away.  Collective"""
        self.gather(None)                          # nobody's message is still to come
        with self.world.lock:
            for boxes in self.world.letters, self.world.posts:
                for channel in self.channel, ("setup", self.channel):
                    for source in range(self.size):
                        boxes.pop((channel, self.rank, source), None)

    def queue(self):
        return ThreadQueue(self)


class ThreadQueue:
    """Hands items to the one thread that owns `wire`, and lets the world know that it waits."""

    def __init__(self, wire):
        self.wire, self.items, self.post = wire, deque(), None

    def put(self, item):
        with self.wire.world.lock:
            self.items.append(item)
            if self.post is not None:
                self.wire.world.finish(self.post)

    def get(self):
        world = self.wire.world
        with world.lock:
            if not self.items:
                self.post = Letter()
                world.wait(self.wire.actor, self.post)
                self.post = None
            return self.items.popleft()


def deliver(world, letter, post):
    """Move a letter into the buffer that waits for it; one of another size is not unpacked."""
    post.tag, post.nbytes = letter.tag, letter.nbytes
    if letter.nbytes == post.data.nbytes and letter.data.dtype == post.data.dtype:
        post.data.reshape(-1)[:] = letter.data.reshape(-1)
    letter.data = post.data = None
    world.finish(letter)
    world.finish(post)


# -- running ranks ------------------------------------------------------------------------------

def run(n, body, sync=False, timeout=None):
    """Call body(wire) on n threads; return the results in rank order, or raise the first error."""
    watch.say_once(environment.crowded() if n > 1 else "")
    world, results, errors = World(n, sync), [None] * n, []

    def rank_thread(actor):
        actor.status.thread_id, error = threading.get_ident(), None
        try:
            results[actor.rank] = body(ThreadWire(world, actor, 0, actor.rank, range(n)))
        except BaseException as raised:                        # noqa: BLE001  (re-raised below)
            error = raised
            errors.append((actor.rank, raised))
        world.leave(actor, error)

    actors = [world.actor(rank) for rank in range(n)]
    threads = [threading.Thread(target=rank_thread, args=(a,), daemon=True) for a in actors]
    for thread in threads:
        thread.start()
    join(world, threads, timeout)
    if errors:
        raise first(errors)
    return results


def join(world, threads, timeout):
    """Wait for all ranks, then for their streams; stop everyone on timeout or Ctrl-C."""
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        for thread in threads:
            thread.join(None if deadline is None else max(0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            with world.lock:
                story = world.story(f"ranks still run after {timeout:g} s")
                world.fail(Stopped("stopped after the timeout"))
            raise TimeoutError(story)
        for end in [actor.end for actor in world.actors if actor.end]:
            end()
    except KeyboardInterrupt:
        with world.lock:
            world.fail(Stopped("interrupted"))
        raise


def first(errors):
    """The error that came first; those of ranks that were merely stopped by it come last."""
    rank, error = min(errors, key=lambda e: type(e[1]) is Stopped)
    if hasattr(error, "add_note") and not isinstance(error, Deadlock):           # Python 3.11
        error.add_note(f"raised by rank {rank}")
    return error
