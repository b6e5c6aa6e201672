"""Look at this machine and say which command starts four ranks here.

    python -m minidist.doctor

It asks everyone for their version, and then tries: two ranks must find each other. A launcher of
another MPI, the usual fault, starts two worlds of one rank each. Started by a launcher itself, as
a rank, it tries that one.
"""
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys

import numpy as np

from minidist import THREAD_VARIABLES, BadInput, flags
from minidist.ranks import comm, environment, launch, safety

TRIAL = """from minidist.ranks import comm, launch
def main():
    with comm.world().stream():
        comm.world().barrier()
launch.run(main)"""
SECONDS = 60
ALONE = ("what needs no ranks, or threads as ranks, runs: python -m lessons.ring, "
         "comm.run_threads(4, fn)")


def main():
    """Print what was found; status 1 if ranks cannot be started."""
    rows = [("Python", f"{platform.python_version()}  {sys.executable}"), ("NumPy", numpy_text()),
            ("mpi4py", mpi4py_text()), ("mpiexec", environment.mpiexec() or "none"),
            ("cores", cores_text()), ("started", started_text())]
    show("\n".join(f"{name:10}{text}" for name, text in rows))
    try:
        problem = missing() or (joined() if environment.launched() else trial(starter(2)))
    except BadInput as error:
        problem = str(error)
    notes = [note for note in (environment.crowded(), environment.cramped()) if note]
    show("\n".join(f"{'':10}{note}" for note in notes))
    if problem:
        show(f"\nProblem: {problem}")
        return 1
    show(f"{'':10}{environment.size() or 2} ranks started and found each other: the launcher and "
         f"mpi4py belong together\n\n{advice()}")
    return 0


def show(text):
    """Print, where several ranks run this, once."""
    if text and environment.rank() == 0:
        print(text)


# -- what there is ------------------------------------------------------------------------------

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
    cores = environment.cores()
    return f"{cores}" + ("" if cores >= 4 else "  (4 ranks share them: right numbers, slower ones)")


def started_text():
    """Who has started this process."""
    if environment.launched():
        return f"by {environment.launcher()}, as one of {environment.size() or 'several'} ranks"
    if in_notebook():
        return "in a notebook"
    job = os.environ.get("SLURM_JOB_ID")
    return f"in job {job} of SLURM" if job else "as a process of its own"


def in_notebook():
    """Is this a notebook's kernel, or a command of one of its cells?"""
    return safety.in_notebook() or "JPY_PARENT_PID" in os.environ


# -- what works ---------------------------------------------------------------------------------

def missing():
    """What has to be installed first, in one sentence, or None."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"there is no mpi4py: pip install mpi4py mpich. Meanwhile, {ALONE}"
    if "does not load" in mpi4py_text():
        return f"mpi4py finds no MPI library: pip install mpich. Meanwhile, {ALONE}"
    if environment.mpiexec() is None:
        return f"there is no mpiexec beside this Python or on PATH; pip install mpich. {ALONE}"
    return None


def joined():
    """Find the other ranks, where this is one.  Collective; raises BadInput where that fails"""
    comm.world().barrier()


def starter(ranks):
    """The command that starts the trial, and its environment."""
    return launch.command(ranks, [sys.executable, "-c", TRIAL]), environment.SETTINGS


def trial(command):
    """Start ranks -> what went wrong, in one sentence, or None."""
    argv, settings = command
    try:
        done = subprocess.run(argv, timeout=SECONDS, env={**settings, **os.environ}, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True)
    except subprocess.TimeoutExpired:
        return f"two ranks did not find each other within {SECONDS} s"
    if done.returncode == 0:
        return None
    said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
    told = next((line for line in said if line.startswith("error: ")), None)
    told = told or environment.cramped() or said[-1]
    return f"two ranks did not find each other (status {done.returncode}): {told}"


def advice():
    """The commands that work here; of the second it was not yet known."""
    if environment.launched():
        return "This works here:   the command that has started this, with another module"
    lines = [f"This works here:   {python()} -m lessons.ring -n 4"]
    words = by_hand()
    if trial(([*words, sys.executable, "-c", TRIAL], {})) is None:
        lines.append(f"and, by hand:      {' '.join(words)} {python()} -m lessons.ring")
    if in_notebook():
        lines.append("In a cell:         comm.run_threads(4, fn), whose ranks are threads")
    return "\n".join(lines)


def by_hand():
    """The launcher's command line for four ranks, with what Open MPI wants to be told."""
    words = [environment.mpiexec()]
    if "Open MPI" in mpi4py_text():
        words += ["--map-by", ":OVERSUBSCRIBE"]
        words += ["--allow-run-as-root"] if hasattr(os, "getuid") and os.getuid() == 0 else []
    return [*words, "-n", "4"]


def python():
    """How this Python is called, as short as it is right."""
    name = os.path.basename(sys.executable)
    found = [os.path.join(d, name) for d in os.environ.get("PATH", "").split(os.pathsep)]
    first = next((f for f in found if os.path.exists(f)), None)
    return name if first == sys.executable else sys.executable


def command():
    """Refuse words that mean nothing here, then look.  -> exit status"""
    flags.Parser(prog="python -m minidist.doctor", description=__doc__.split("\n")[0]).parse_args()
    return main()


if __name__ == "__main__":
    launch.run(command)
