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

from minidist.ranks.buffers import HEADER
from minidist.ranks.wire import Wire


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


class SlowWire(Wire):
    """A wire whose messages cross a Link."""

    def __init__(self, wire, link):
        self.wire, self.link = wire, link

    @property
    def bare(self):
        return self.wire

    def isend(self, x, to, tag):
        start, free = self.link.depart(x.nbytes)
        header = self.wire.isend(np.array([start]), to, HEADER)
        return Sent(header, self.wire.isend(x, to, tag), free)

    def irecv(self, into, source):
        start = np.empty(1)
        return Coming(self.link, self.wire.irecv(start, source), start,
                      self.wire.irecv(into, source), into.nbytes)


def over(wire, link):
    """Put a link over a wire, or take it off: None."""
    return wire.bare if link is None else SlowWire(wire.bare, link)


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
        self.comm, self.before, self.link = comm, comm._link, link
        self.put(link, self.before)

    def put(self, new, old):
        """Give a link to this group and those made from it, save those with one of their own."""
        for c in self.comm._everyone():
            if c._link is old:
                c._use(new)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.put(self.before, self.link)
