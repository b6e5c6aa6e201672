"""Programs that fail, one function each: python -m tests.failures NAME -n 3

The line at which the others wait, or which raises, ends with the comment "# <- NAME".
"""
import os
import signal
import sys
import threading
import time

import numpy as np

from minidist import BadInput
from minidist.ranks import launch
from minidist.ranks import comm as comms


def neighbours(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def fine(comm):
    """No failure at all: a stream is still there when the rank leaves."""
    stream = comm.stream()
    stream.submit(lambda comm: comm.barrier()).wait()
    time.sleep(0.3 * comm.rank)


def raises(comm):
    if comm.rank == 1:
        raise ValueError("boom")                                      # <- raises
    comm.shift(np.ones(10), np.empty(10))


def keyboard_interrupt(comm):
    if comm.rank == 1:
        raise KeyboardInterrupt
    comm.recv(np.empty(10), 1)


def raises_everywhere(comm):
    raise ValueError("boom")                                          # <- raises_everywhere


def exits(comm):
    if comm.rank == 1:
        sys.exit(3)
    comm.recv(np.empty(10), 1)                                        # <- exits


def exits_everywhere(comm):
    sys.exit(3)


def system_exit(comm):
    if comm.rank == 1:
        raise SystemExit(3)
    comm.recv(np.empty(10), 1)                                        # <- system_exit


def returns_a_status(comm):
    return 4


def nobody_sends(comm):
    if comm.rank == 0:
        comm.recv(np.empty(10), 1)                                    # <- nobody_sends


def cycle(comm):
    comm.recv(np.empty(10), neighbours(comm)[1])                      # <- cycle


def send_first(comm):
    right, left = neighbours(comm)
    comm.send(np.ones(1_000_000), right)                              # <- send_first
    comm.recv(np.empty(1_000_000), left)


def send_small_first(comm):
    right, left = neighbours(comm)
    comm.send(np.ones(1), right)                                      # <- send_small_first
    comm.recv(np.empty(1), left)


def different_collectives(comm):
    with comm.operation("broadcast" if comm.rank == 0 else "all_reduce"):
        comm.recv(np.empty(10), neighbours(comm)[1])                  # <- different_collectives


def leaves_early(comm):
    if comm.rank != 1:
        comm.recv(np.empty(10), 1)                                    # <- leaves_early


def never_sends_to_all(comm):
    if comm.rank != 1:
        others = [r for r in range(comm.size) if r != comm.rank]
        comm.exchange([(np.ones(9), r, np.empty(9), r) for r in others])  # <- never_sends_to_all


def computes(comm):
    while comm.rank == 1:
        time.sleep(0.01)
    comm.recv(np.empty(10), 1)                                        # <- computes


def stream_waits(comm):
    stream = comm.stream()
    if comm.rank == 0:
        stream.submit(wait_for_one).wait()                            # <- stream_waits
    comm.barrier()


def wait_for_one(comm):
    return comm.recv(np.empty(10), 1)


def os_exit(comm):
    if comm.rank == 1:
        time.sleep(0.6)                            # the others have written that they wait
        os._exit(0)
    comm.recv(np.empty(10), 1)                                        # <- os_exit


def killed(comm):
    if comm.rank == 1:
        time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.recv(np.empty(10), 1)                                        # <- killed


def killed_waiting(comm):
    """The one that dies waits, as the others do; mpiexec kills one that computes."""
    if comm.rank == 1:
        threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while comm.rank == 2:
        time.sleep(0.01)
    comm.recv(np.empty(10), 1 if comm.rank == 0 else 2)               # <- killed_waiting


def interrupted(comm):
    if comm.rank == 0:
        print("waiting", flush=True)
    comm.recv(np.empty(10), neighbours(comm)[1])                      # <- interrupted


def bad_input(comm):
    raise BadInput("6 heads do not split over 4 ranks; use 2 or 3")


def bad_input_on_one(comm):
    if comm.rank == 1:
        raise BadInput("no file x.txt; give another")
    comm.barrier()                                                    # <- bad_input_on_one


def main():
    comm = comms.world()
    comm.barrier()
    return globals()[sys.argv[1]](comm)


if __name__ == "__main__":
    if "bare" in sys.argv:                         # a user's own script, without launch.run
        main()
    else:
        launch.run(main)
