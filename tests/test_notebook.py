"""Four ranks in a notebook's kernel: results, an error, a deadlock, an interruption, and on."""
import os
import re
import time

import pytest

from tests import mpi

PREPARE = """
import numpy as np
from minidist.ranks import comm as comms
def ring(comm):
    total = x = np.full(3, comm.rank + 1.0)
    for _ in range(comm.size - 1):
        x = comm.shift(x, np.empty(3))
        total = total + x
    return float(total[0])
"""
GOOD = "print(comms.run_threads(4, ring))"
ERROR = """
def body(comm):
    if comm.rank == 2:
        raise KeyError("boom")
    comm.recv(np.empty(3), 2)
comms.run_threads(4, body)"""
DEADLOCK = """def body(comm):
    comm.recv(np.empty(3), (comm.rank + 1) % comm.size)
comms.run_threads(4, body)"""
ENDLESS = """
def body(comm):
    if comm.rank == 0:
        print("begun", flush=True)
    while True:
        comm.barrier()
comms.run_threads(4, body)"""


@pytest.fixture(scope="module")
def kernel():
    """A real kernel -> (its manager, its client)"""
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    manager = pytest.importorskip("jupyter_client.manager")
    hidden = {"PMI_RANK", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS",
              "VECLIB_MAXIMUM_THREADS"}
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    found, client = manager.start_new_kernel(cwd=str(mpi.ROOT), env=env)
    yield found, client
    client.stop_channels()
    found.shutdown_kernel(now=True)


def run(client, code, during=None):
    """Execute a cell -> (what it printed, the name of its error or None, the error's text)"""
    out, error = [], (None, "")

    def hear(message):
        nonlocal error
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "stream":
            out.append(content["text"])
            if during:
                during(content["text"])
        elif kind == "error":
            error = content["ename"], content["evalue"]
    client.execute_interactive(code, timeout=mpi.HANG, output_hook=hear)
    return "".join(out), *error


def test_a_session_outlives_what_goes_wrong_in_it(kernel):
    manager, client = kernel
    assert run(client, PREPARE) == ("", None, "")
    out, name, text = run(client, GOOD)
    assert name is None and "[10.0, 10.0, 10.0, 10.0]\n" in out, (out, text)
    assert out.count("import minidist before numpy") <= 1           # on one core: not at all

    out, name, text = run(client, ERROR)
    assert (name, text) == ("KeyError", "'boom'")
    out, name, text = run(client, DEADLOCK)
    assert name == "Deadlock" and "a cycle of receives (rank 0 -> rank 1 -> rank 2 -> rank" in text
    assert re.search(r"rank 3 waits for a message from rank 0 .* at In\[\d+\]:2 in body", text)

    began = time.monotonic()
    out, name, text = run(client, ENDLESS, during=lambda text: manager.interrupt_kernel())
    assert name == "KeyboardInterrupt" and out == "begun\n" and time.monotonic() - began < mpi.HANG
    assert run(client, GOOD) == ("[10.0, 10.0, 10.0, 10.0]\n", None, "")


def test_a_world_of_processes_leaves_the_session_alone(kernel):
    """comm.world() in a kernel is a group of one, whose errors end nothing."""
    _, client = kernel
    out, name, text = run(client, "from minidist.ranks import comm\nprint(comm.world().size)")
    assert (out, name) == ("1\n", None), text
    assert run(client, "comm.world().send(1, 0)")[1] is not None
    assert run(client, "import sys\nsys.exit(3)")[1] in (None, "SystemExit")
    assert run(client, "print(comm.world().size, comm.run_threads(2, lambda c: c.rank))") == (
        "1 [0, 1]\n", None, "")
