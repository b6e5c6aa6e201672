"""Programs that fail, one function each: python -m tests.failures NAME -n 3

The line at which the others wait, or which raises, ends with the comment "# <- NAME".
"""
import importlib
import os
import signal
import sys
import tempfile
import threading
import time

import numpy as np

from minidist import BadInput
from minidist.engine.tensor import Tensor
from minidist.ranks import environment, launch
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


def raises_half_a_character(comm):
    if comm.rank == 1:
        raise ValueError("no file \udce4")
    comm.recv(np.empty(10), 1)                                        # <- raises_half_a_character


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


def raises_unprintable(comm):
    if comm.rank == 1:
        raise Unprintable
    comm.recv(np.empty(10), 1)                                        # <- raises_unprintable


def raises_in_no_folder(comm):
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    if comm.rank == 1:
        raise ValueError("boom")
    comm.recv(np.empty(10), 1)                                        # <- raises_in_no_folder


def closes_stderr(comm):
    os.close(2)
    if comm.rank == 1:
        raise ValueError("boom")
    comm.recv(np.empty(10), 1)                                        # <- closes_stderr


def float_as_rank(comm):
    if comm.rank == 0:
        comm.recv(np.empty(10), 1.0)                                  # <- float_as_rank


def exits(comm):
    if comm.rank == 1:
        sys.exit(3)
    comm.recv(np.empty(10), 1)                                        # <- exits


def exits_256(comm):
    """Eight bits of a status reach the launcher: of this one only zeros."""
    if comm.rank == 1:
        sys.exit(256)
    comm.recv(np.empty(10), 1)                                        # <- exits_256


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


def crashes(comm):
    if comm.rank == 1:
        time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGSEGV)
    comm.recv(np.empty(10), 1)                                        # <- crashes


def os_exits_7(comm):
    if comm.rank == 1:
        time.sleep(0.6)
        os._exit(7)
    comm.recv(np.empty(10), 1)                                        # <- os_exits_7


def stops(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    comm.recv(np.empty(10), 1)                                        # <- stops


def error_in_stream(comm):
    stream = comm.stream()
    work = stream.submit(stream_error if comm.rank == 1 else wait_for_one)
    work.wait()                                                       # <- error_in_stream


def stream_error(comm):
    raise ValueError("boom")


def error_in_hook(comm):
    x = Tensor(np.ones(3), requires_grad=True)
    x.register_post_accumulate_grad_hook(
        hook_error if comm.rank == 1 else lambda x: comm.recv(np.empty(10), 1))
    x.sum().backward()


def hook_error(x):
    raise ValueError("boom")                                          # <- error_in_hook


def full_disk(comm):
    if comm.rank == 1:
        with open("/dev/full", "w") as file:
            file.write("x" * 100_000)                                 # <- full_disk
    comm.recv(np.empty(10), 1)


def closed_pipe(comm):
    """Print, and wait, when nobody reads any more."""
    while comm.rank == 0:
        print("a line")
        time.sleep(0.01)
    comm.recv(np.empty(10), 0)                                        # <- closed_pipe


def interrupted(comm):
    def tell():
        """Speak when rank 0 waits, and not before: then the job is interrupted."""
        while comm._status.now is None:
            time.sleep(0.01)
        print("waiting", flush=True)

    if comm.rank == 0:
        threading.Thread(target=tell, daemon=True).start()
    comm.recv(np.empty(10), neighbours(comm)[1])                      # <- interrupted


def bad_input(comm):
    raise BadInput("6 heads do not split over 4 ranks; use 2 or 3")


def bad_input_on_one(comm):
    if comm.rank == 1:
        raise BadInput("no file x.txt; give another")
    comm.barrier()                                                    # <- bad_input_on_one


# -- before the ranks have joined, on rank 1 alone ----------------------------------------------

def early_return():
    return 0


def early_exit():
    sys.exit(3)


def early_error():
    raise ValueError("boom")                                          # <- early_error


def early_import():
    importlib.import_module("no_such_module")                         # <- early_import


def early_os_exit():
    os._exit(0)


def early_bad_input():
    raise BadInput("no file x.txt; give another")


def early_bad_input_of_all():
    bad_input(None)


def main():
    if sys.argv[1].startswith("early_") and (environment.rank() == 1 or "all" in sys.argv[1]):
        return globals()[sys.argv[1]]()
    comm = comms.world()                                              # <- main
    comm.barrier()
    if not sys.argv[1].startswith("early_"):
        return globals()[sys.argv[1]](comm)


if __name__ == "__main__":
    if "bare" in sys.argv:                         # a user's own script, without launch.run
        main()
    else:
        launch.run(main)
