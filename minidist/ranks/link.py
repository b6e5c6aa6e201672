"""A slow network in software: messages that really arrive late, for lessons about slow links.

    sender     |= n / bandwidth =|                       its port is busy this long
    wire                          . latency .
    receiver              |= n / bandwidth =|            its port too: many senders to one wait here

Every message is preceded by the time at which it left; the receiver hands it over when it would
have arrived. All clocks must be one, so this is for ranks of one machine.
"""
import math
import threading
import time

import numpy as np

HEADER = 0x7FFF            # the tag of a departure time: no array has this type code and number


class Link:
    """One rank's port to a link.  latency: seconds; bandwidth: bytes per second, each direction"""

    def __init__(self, latency=0.0, bandwidth=math.inf):
        self.latency, self.bandwidth = latency, bandwidth
        self.lock, self.out_free, self.in_free = threading.Lock(), 0.0, 0.0

    def depart(self, nbytes):
        """Take the outgoing port for a message -> (when it starts, when the port is free again)"""
        with self.lock:
            start = max(time.monotonic(), self.out_free)
            self.out_free = start + nbytes / self.bandwidth
            return start, self.out_free

    def arrive(self, start, nbytes):
        """Take the incoming port for a message that left at start -> when it is all here"""
        with self.lock:
            self.in_free = max(start + self.latency, self.in_free) + nbytes / self.bandwidth
            return self.in_free


class SlowWire:
    """A wire whose messages cross a Link."""

    def __init__(self, wire, link):
        self.wire, self.link = wire, link

    def isend(self, x, to, tag):
        start, free = self.link.depart(x.nbytes)
        header = self.wire.isend(np.array([start]), to, HEADER)
        return Sent(header, self.wire.isend(x, to, tag), free)

    def irecv(self, into, source):
        start = np.empty(1)
        return Coming(self.link, self.wire.irecv(start, source), start,
                      self.wire.irecv(into, source), into.nbytes)

    def exchange(self, moves, tags, nbytes):
        return exchange(self, moves, tags)

    def send(self, x, to, tag):
        self.isend(x, to, tag).wait()

    def recv(self, into, source):
        return self.irecv(into, source).wait()

    def sendrecv(self, x, to, tag, into, source):
        sent = self.isend(x, to, tag)
        came = self.irecv(into, source).wait()
        sent.wait()
        return came


def exchange(wire, moves, tags):
    """Start all receives, then all sends, and wait for each -> what came, as recv returns it"""
    coming = [wire.irecv(into, source) for _, _, into, source in moves]
    going = [wire.isend(x, to, tag) for (x, to, _, _), tag in zip(moves, tags)]
    came = [handle.wait() for handle in coming]
    for handle in going:
        handle.wait()
    return came


class Sent:
    """A started send: done when the port is free again."""

    def __init__(self, header, message, free):
        self.header, self.message, self.free = header, message, free

    def ready(self):
        return self.message.ready() and time.monotonic() >= self.free

    def wait(self):
        self.header.wait()
        self.message.wait()
        sleep_until(self.free)


class Coming:
    """A started receive: done when the message would have arrived."""

    def __init__(self, link, header, start, message, nbytes):
        self.link, self.header, self.start = link, header, start
        self.message, self.nbytes = message, nbytes

    def ready(self):
        """Roughly: is it here, and the time that its way takes over?"""
        way = self.link.latency + self.nbytes / self.link.bandwidth
        return self.message.ready() and time.monotonic() >= self.start[0] + way

    def wait(self):
        tag, nbytes = self.header.wait()
        if tag != HEADER:
            return HEADER, nbytes                  # the sender has no link: the caller says so
        came = self.message.wait()
        sleep_until(self.link.arrive(self.start[0], self.nbytes))
        return came


def sleep_until(when):
    left = when - time.monotonic()
    if left > 0:
        time.sleep(left)


class Linked:
    """A link in effect, as Comm.link returns it; as a context manager it ends with the block."""

    def __init__(self, comm, link):
        # Groups made from this one share its port, except those with a link of their own.
        self.before = [(c, c._link) for c in comm._everyone() if c._link is comm._link]
        for c, _ in self.before:
            c._use(link)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for c, link in self.before:
            c._use(link)
