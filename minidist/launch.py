"""Start the ranks of a command, and give its mistakes a plain ending."""
import os
import shutil
import sys

from minidist import BadInput

# Both MPIs: as root, more ranks than cores, and a waiting rank leaves its core to others.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
RANK_VARIABLES = "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"


def run(main):
    """Run a command's main(): `-n N` starts N ranks of it, BadInput ends it with status 2."""
    relaunch()
    try:
        main()
    except BadInput as error:
        if my_rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def my_rank():
    """This process's rank in the job, as its launcher says (0 without one)."""
    return int(next((os.environ[v] for v in RANK_VARIABLES if v in os.environ), 0))


def mpiexec():
    """The launcher that belongs to this Python, or None."""
    here = os.path.dirname(sys.executable)
    return shutil.which("mpiexec", path=here) or shutil.which("mpiexec")


def command(n, argv):
    """The command line that runs argv on n ranks."""
    return [mpiexec(), "-n", str(n), *argv]


def relaunch():
    """Under `-n N`, run the same command again on N ranks and end with its status."""
    if "-n" not in sys.argv:
        return
    at = sys.argv.index("-n")
    n = sys.argv[at + 1]
    del sys.argv[at:at + 2]
    if any(v in os.environ for v in RANK_VARIABLES):
        return
    argv = list(sys.orig_argv)
    at = argv.index("-n")
    del argv[at:at + 2]
    if mpiexec() is None:
        sys.exit("error: no mpiexec found beside this Python or on PATH; pip install mpich")
    os.environ.update({k: v for k, v in ENVIRONMENT.items() if k not in os.environ})
    sys.stdout.flush()
    os.execv(mpiexec(), command(n, [sys.executable, *argv[1:]]))
