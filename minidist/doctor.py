"""Look at this machine and say which command starts four ranks here.

    python -m minidist.doctor

It asks everyone for their version, and then tries: two ranks must find each other. A launcher of
another MPI, the usual fault, starts two worlds of one rank each.
"""
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys

import numpy as np

from minidist import THREAD_VARIABLES
from minidist.ranks import environment, launch

TRIAL = "from minidist.ranks import comm, launch; launch.run(lambda: comm.world().barrier())"
SECONDS = 60


def main():
    """Print what was found; status 1 if ranks cannot be started."""
    rows = [("Python", f"{platform.python_version()}  {sys.executable}"), ("NumPy", numpy_text()),
            ("mpi4py", mpi4py_text()), ("mpiexec", environment.mpiexec() or "none"),
            ("cores", cores_text())]
    for name, text in rows:
        print(f"{name:10}{text}")
    problem = missing() or trial()
    if problem:
        print(f"\nProblem: {problem}")
        return 1
    print("          2 ranks started and found each other: mpiexec and mpi4py belong together\n\n"
          f"This works here:   {python()} -m lessons.ring -n 4")
    return 0


def numpy_text():
    """NumPy's version, its BLAS, and how many threads that may use."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    threads = next((os.environ[v] for v in THREAD_VARIABLES if v in os.environ), "all cores")
    return f"{np.__version__}, BLAS {blas['name']} {blas['version']}, threads per rank: {threads}"


def mpi4py_text():
    """mpi4py's version, and the MPI that it is linked with."""
    if importlib.util.find_spec("mpi4py") is None:
        return "none"
    version = importlib.metadata.version("mpi4py")
    try:
        from minidist.ranks import processes
    except Exception as error:                                 # noqa: BLE001  (whatever it is)
        return f"{version}, but its MPI library does not load: {error}"
    return f"{version}, linked with {processes.library()}"


def cores_text():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores}" + ("" if cores >= 4 else "  (4 ranks share them: right numbers, slower ones)")


def missing():
    """What has to be installed first, in one sentence, or None."""
    if importlib.util.find_spec("mpi4py") is None:
        return ("there is no mpi4py, so ranks can only be threads of one process; "
                "pip install mpi4py mpich")
    if environment.mpiexec() is None:
        return "there is no mpiexec beside this Python or on PATH; pip install mpich"
    return None


def trial():
    """Start two ranks -> what went wrong, in one sentence, or None."""
    try:
        done = subprocess.run(launch.command(2, [sys.executable, "-c", TRIAL]), timeout=SECONDS,
                              env={**environment.SETTINGS, **os.environ}, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True)
    except subprocess.TimeoutExpired:
        return f"two ranks did not find each other within {SECONDS} s"
    if done.returncode == 0:
        return None
    said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
    told = next((line for line in said if line.startswith("error: ")), said[-1])
    return f"two ranks did not find each other (status {done.returncode}): {told}"


def python():
    """How this Python is called, as short as it is right."""
    name = os.path.basename(sys.executable)
    found = [os.path.join(d, name) for d in os.environ.get("PATH", "").split(os.pathsep)]
    first = next((f for f in found if os.path.exists(f)), None)
    return name if first == sys.executable else sys.executable


if __name__ == "__main__":
    launch.run(main)
