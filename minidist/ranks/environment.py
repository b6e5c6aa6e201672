"""What the launcher tells its processes, what we must tell it, and the user's settings."""
import importlib.util
import math
import os
import shutil
import sys

from minidist import NUMPY_CAME_FIRST, BadInput

# For Open MPI (MPICH needs none of it): run as root in a container, run more ranks than cores, and
# let a rank that waits leave its core to the others.
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",         # Open MPI 5
    "OMPI_MCA_rmaps_base_oversubscribe": "1",                          # Open MPI 4
    "OMPI_MCA_mpi_yield_when_idle": "1",
}

# Who starts processes, and the variables in which each learns its rank and how many there are. The
# nearest launcher comes first: an mpirun that runs inside SLURM's job sees the variables of both.
LAUNCHERS = {
    "mpirun": ("PMI_RANK", "PMI_SIZE"),                                # MPICH's
    "Open MPI's mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "PMIx": ("PMIX_RANK",),                                            # which tells no size
    "torchrun": ("RANK", "WORLD_SIZE"),
}
LITTLE = 64e6                           # bytes of shared memory: what four ranks of MPICH may need
ALSO_FOR_ONE = "srun", "torchrun"       # set these variables for a process of its own, too


# -- the launcher -------------------------------------------------------------------------------

def launcher():
    """Name what started this process as a rank; None for a process of its own."""
    for name, (rank, *sizes) in LAUNCHERS.items():
        if number(rank) is not None and not batch_script(name) and (
                name not in ALSO_FOR_ONE or (number(*sizes) or 1) > 1):
            return name
    return None


def batch_script(name):
    """Is this a batch script of SLURM's?  It is one process, and knows how many may be started"""
    return (name == "srun" and os.environ.get("ENVIRONMENT") == "BATCH"
            and "SLURM_STEP_NUM_TASKS" not in os.environ)


def rank():
    """This process's rank, as its launcher says; 0 without one."""
    name = launcher()
    return number(LAUNCHERS[name][0]) if name else 0


def size():
    """How many processes the launcher started, or None if none did, or it does not say."""
    name = launcher()
    return number(*LAUNCHERS[name][1:]) if name else None


def local_size():
    """How many processes the launcher started on this machine, or None."""
    return number("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")


def launched():
    """Has a launcher started this process as a rank?"""
    return launcher() is not None


def number(*names):
    """The first of these variables that holds a count, or None."""
    values = [os.environ.get(name, "") for name in names]
    return next((int(v) for v in values if v.isascii() and v.isdigit()), None)


def mpiexec():
    """The launcher that belongs to this Python: the one beside it, or else the first on PATH."""
    return beside() or shutil.which("mpiexec")


def beside():
    """The launcher in the same folder as this Python, as a wheel installs it, or None."""
    return shutil.which("mpiexec", path=os.path.dirname(sys.executable))


def lacking():
    """What has to be installed before ranks can be processes, in one sentence; "" for nothing."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"{sys.executable} has no mpi4py: pip install mpi4py mpich"
    if mpiexec() is None:
        return "no mpiexec beside this Python or on PATH: pip install mpich"
    return ""


# -- the user's settings ------------------------------------------------------------------------

def timeout():
    """MINIDIST_TIMEOUT: seconds that a rank may wait; 0: for ever."""
    return setting("MINIDIST_TIMEOUT", float, 60, 0, "seconds that a rank may wait, 0: for ever")


def piece():
    """MINIDIST_PIECE: the longest MPI message in bytes."""
    return setting("MINIDIST_PIECE", int, 2**30, 1, "the longest MPI message in bytes, 1 or more")


def check():
    """MINIDIST_CHECK: do ranks compare which collective they are about to make?"""
    return setting("MINIDIST_CHECK", int, 0, 0, "1 or 0", most=1) == 1


def sync():
    """MINIDIST_SYNC: does every MPI send wait for its receive?"""
    return setting("MINIDIST_SYNC", int, 0, 0, "1 or 0", most=1) == 1


def setting(name, kind, default, least, what, most=math.inf):
    """Read a number from the environment; refuse what is none, or no sensible one."""
    text = os.environ.get(name) or str(default)
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most or value == math.inf:
        raise BadInput(f"{name}={text}: give {what}, or leave it unset")
    return value


def check_settings():
    """Refuse a wrong setting before anything starts."""
    for read in timeout, piece, check, sync:
        read()


# -- where the ranks are ------------------------------------------------------------------------

def cores():
    """How many cores this process may use; macOS does not say, so there: how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def cramped():
    """What to say where ranks have too little memory in common to start; "" where they have it."""
    try:
        space = os.statvfs("/dev/shm")
    except (OSError, AttributeError):             # a system without it
        return ""
    free = space.f_bavail * space.f_frsize
    if free >= LITTLE:
        return ""
    return (f"/dev/shm, through which the ranks of a machine talk, has {free / 1e6:.1f} MB free: "
            "give it more (docker run --shm-size=1g; as root, mount -o remount,size=1g /dev/shm)")


def crowded():
    """What to say where every rank's BLAS takes all cores; "" where each takes one."""
    if not NUMPY_CAME_FIRST or cores() == 1:
        return ""
    return (f"minidist: NumPy was imported first, so that each rank computes on all {cores()} "
            "cores and slows the others down: import minidist before numpy, or set "
            "OMP_NUM_THREADS=1")


def on_terminal():
    """Does a reader's terminal show what this process prints, so that a line can move?

    Open MPI gives its ranks terminals of its own, whatever its mpirun writes to: ask that one.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        return False
    if "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return True
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:                               # a system without /proc
        return False
