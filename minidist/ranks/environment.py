"""What the launcher tells its processes, and what we must tell the launcher."""
import os
import shutil
import sys

# For Open MPI (MPICH needs none of it): run as root in a container, run more ranks than cores, and
# let a rank that waits leave its core to the others.
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",         # Open MPI 5
    "OMPI_MCA_rmaps_base_oversubscribe": "1",                          # Open MPI 4
    "OMPI_MCA_mpi_yield_when_idle": "1",
}

RANK = "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"
SIZE = "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"


def rank():
    """This process's rank, as its launcher says; 0 without one."""
    return int(first(RANK) or 0)


def size():
    """How many processes the launcher started, or None if none did."""
    value = first(SIZE)
    return None if value is None else int(value)


def launched():
    """Has some mpirun started this process?"""
    return first(RANK) is not None


def first(names):
    return next((os.environ[n] for n in names if n in os.environ), None)


def mpiexec():
    """The launcher that belongs to this Python: the one beside it, or else the first on PATH."""
    return beside() or shutil.which("mpiexec")


def beside():
    """The launcher in the same folder as this Python, as a wheel installs it, or None."""
    return shutil.which("mpiexec", path=os.path.dirname(sys.executable))
