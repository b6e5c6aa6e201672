"""Small values between ranks, as JSON: what the kit says, beside the lesson's own traffic."""
import json
import time

import numpy as np


def collect(comm, value):
    """Gather one small value (numbers, text, lists) of every rank, for every rank.  -> list"""
    if comm.rank:
        send(comm, [value], 0)
        return receive(comm, 0)
    values = [value] + [receive(comm, r)[0] for r in range(1, comm.size)]
    for r in range(1, comm.size):
        send(comm, values, r)
    return values


def share(comm, make, asleep):
    """Let rank 0 compute a small value; the others wait, asleep if its core is needed."""
    if comm.rank:
        return receive(comm, 0, asleep)
    value = make()
    for r in range(1, comm.size):
        send(comm, value, r)
    return value


def send(comm, value, to):
    text = np.frombuffer(json.dumps(value).encode(), np.uint8).copy()
    comm.send(np.array([text.size]), to)
    comm.send(text, to)


def receive(comm, source, asleep=False):
    length = np.empty(1, np.int64)
    coming = comm.irecv(length, source)
    while asleep and not coming.ready():
        time.sleep(0.005)
    coming.wait()
    return json.loads(comm.recv(np.empty(length[0], np.uint8), source).tobytes())
