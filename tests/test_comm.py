"""Comm over MPI and over threads: the same messages, checks and counts."""
import numpy as np
import pytest

from minidist import comm as comms
from tests.mpi import on_ranks


def exchange(comm, n, dtype):
    """Every kind of message once around the ring."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    x = np.full(n, comm.rank + 1, dtype)
    expected = np.full(n, left + 1, dtype)
    into = np.zeros(n, dtype)
    assert comm.shift(x, into) is into
    np.testing.assert_array_equal(into, expected)
    np.testing.assert_array_equal(comm.sendrecv(x, right, np.zeros(n, dtype), left), expected)
    incoming, outgoing = comm.irecv(np.zeros(n, dtype), left), comm.isend(x, right)
    np.testing.assert_array_equal(incoming.wait(), expected)
    outgoing.wait()
    comm.barrier()


SHAPES = [0, 1, 5, (2, 3), (0, 4), (), 200_000]
DTYPES = ["f4", "f8", "f2", "i8", "i4", "u1", "?", "c16"]


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 16])
def test_every_message_on_threads(p, sync):
    for n in SHAPES:
        comms.run_threads(p, exchange, n, "f8", sync=sync)
    for dtype in DTYPES:
        comms.run_threads(p, exchange, 5, dtype, sync=sync)


@pytest.mark.parametrize("sync", ["0", "1"])
def test_every_message_on_mpi(sync):
    on_ranks(every_message, 4, env={"MINIDIST_SYNC": sync})


def every_message(comm):
    for n in SHAPES:
        exchange(comm, n, "f8")
    for dtype in DTYPES:
        exchange(comm, 5, dtype)
    exchange(comm.split(comm.rank % 2), 5, "f4")
