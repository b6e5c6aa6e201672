"""What a message through Comm costs beside the bare mpi4py call.  Prints; asserts nothing.

    python -m tests.speed_comm -n 2

The same sendrecv around the ring both ways, in turn, so that a busy moment hits both; median,
minimum and maximum over rounds of one call's time.  Watchdog, counters and checks are on.
"""
import time

import numpy as np
from mpi4py import MPI

from minidist.ranks import comm as comms
from minidist.ranks import launch

ROUNDS = 41


def main():
    comm, bare = comms.world(), MPI.COMM_WORLD.Dup()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank == 0:
        print(f"{comm.size} ranks, {MPI.Get_library_version().splitlines()[0]}, {ROUNDS} rounds\n"
              "   bytes  call     median us    min    max")
    for nbytes, calls in (8, 2000), (1024, 2000), (65536, 500), (1 << 20, 50), (16 << 20, 4):
        x, into = np.ones(nbytes // 8), np.zeros(nbytes // 8)

        def plain(x=x, into=into):
            bare.Sendrecv(x, right, 0, into, left, 0)

        def ours(x=x, into=into):
            comm.sendrecv(x, right, into, left)

        times = rounds(bare, [plain, ours], calls)
        if comm.rank == 0:
            show(nbytes, times)


def rounds(bare, functions, calls):
    """Time each function in turn, again and again.  -> [rounds, functions] us per call"""
    times = np.empty((ROUNDS, len(functions)))
    for i in range(ROUNDS):
        for j, function in enumerate(functions):
            bare.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            times[i, j] = (time.perf_counter() - start) / calls * 1e6
    bare.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return times


def show(nbytes, times):
    median = np.median(times, axis=0)
    for name, column, m in zip(["mpi4py", "Comm"], times.T, median):
        print(f"{nbytes:8d}  {name:7s} {m:10.2f} {column.min():6.2f} {column.max():6.2f}")
    print(f"{'':10}ratio {median[1] / median[0]:.2f}, difference {median[1] - median[0]:.2f} us")


if __name__ == "__main__":
    launch.run(main)
