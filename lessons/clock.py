"""Clocks that several lessons read.  What they show is printed, never demanded."""
import time

import numpy as np


def best(work, tries=5):
    """The shortest of some times: the machine has other things to do as well."""
    laps = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        laps.append(time.perf_counter() - start)
    return min(laps)


def together(lesson, work, *args, **options):
    """Median time of what all ranks do together, of five; each time is the slowest rank's."""
    laps = []
    for _ in range(5):
        lesson.comm.barrier()
        start = time.perf_counter()
        work(*args, **options)
        laps.append(time.perf_counter() - start)
    return float(np.median(np.max(lesson.collect(laps), axis=0)))


def link(lesson, nbytes=1 << 21):
    """Ping-pong between ranks 0 and 1.  -> alpha seconds, beta seconds per byte; None, None alone

    alpha + bytes x beta is what a message takes."""
    pair = lesson.comm.split(0 if lesson.comm.rank < 2 else None, name="pair")
    if pair is None:
        time.sleep(0.3)                               # a rank that waits awake takes a core
    short, long = (lesson.collect(rally(pair, n) if pair and pair.size == 2 else None)[0]
                   for n in (8, nbytes))
    return (short, max(long - short, 1e-12) / nbytes) if short else (None, None)


def rally(pair, nbytes):
    x = np.ones(nbytes, np.uint8)

    def there_and_back():
        for turn in (0, 1):
            (pair.send if turn == pair.rank else pair.recv)(x, 1 - pair.rank)

    return best(there_and_back, 20 if nbytes == 8 else 6) / 2


def fastest(comm, step, tries=3):
    """Run a step on all ranks.  -> seconds of the fastest, its receives: [(group, start, end)]"""
    found = []
    for _ in range(tries):
        comm.barrier()
        with comm.recording() as events:
            start = time.perf_counter()
            step()
            end = time.perf_counter()
        found.append((end - start, [(e.group, e.start - start, e.end - start)
                                    for e in events if e.kind == "recv"]))
    return min(found)


def sgemm(n=1024):
    """Flop/s of a float32 matrix product."""
    a, b = np.ones((2, n, n), np.float32)
    out = np.empty((n, n), np.float32)
    return 2 * n ** 3 / best(lambda: np.matmul(a, b, out=out), 12)


def triad(n=16 << 20):
    """Bytes/s of c = a + b from and to memory."""
    a, b, out = np.ones((3, n), np.float32)
    return 3 * out.nbytes / best(lambda: np.add(a, b, out=out))
