"""Before MPI starts: all processes of a machine come, or those who came say who did not.

    rank 0   comm.world() ....... waits .......+
    rank 1   reads a text ...... comm.world() .+--> MPI_Init
    rank 2   ends before that                       "... for rank 2, which ended before it came"

MPI_Init returns when every process has called it. Meanwhile it holds Python's lock and hears no
Ctrl-C: where one process has ended before (a file missing, an error in an import, os._exit), the
others would stay in it for ever, without a word. So they meet first. Each puts up a sign, a socket
under a name of the job, which needs no file and vanishes with its process; and the children of the
launcher are in /proc. Where that cannot be seen, as on other systems than Linux, MPI_Init comes at
once.
"""
import os
import re
import socket
import sys
import time
from pathlib import Path

from minidist.ranks import environment, report, watch

LAUNCHERS = {"hydra_pmi_proxy", "mpiexec", "mpirun", "mpiexec.hydra", "prterun", "prted", "orted"}
MISSING = 2.0                   # seconds without one of the processes: the launcher starts no more
STARTING = 30.0                 # seconds that a process may take to come, at least
PROC = Path("/proc")

_signs = []                     # mine, for as long as this process lives


def wait_for_all():
    """Return when all that the launcher started on this machine are here, or end this process."""
    launcher, size = find_launcher(), environment.local_size()
    if launcher is None or size is None or not put_up(launcher, environment.rank()):
        return
    began = complete = time.monotonic()
    while len(here := signs(launcher)) < size:
        time.sleep(0.02)
        now, timeout = time.monotonic(), environment.timeout()
        living = children(launcher)
        complete = now if living is None or len(living) >= size else complete
        if now - complete > (min(MISSING, timeout / 2) or MISSING):
            give_up(launcher, now - began, missing(living), ", which ended before it came there")
        if timeout and now - began > max(timeout, STARTING):
            give_up(launcher, now - began, missing(here), f"; MINIDIST_TIMEOUT={timeout:g}")


def give_up(launcher, seconds, whom, why):
    """Say where this process waits, and for whom, unless another has said so; and end."""
    if put_up(launcher, "report"):
        line = report.user_line(sys._getframe())
        watch.last_words(f"minidist: rank {environment.rank()} has waited {seconds:.1f} s in "
                         f"comm.world() for {whom}{why}; the job ends\n"
                         f"  rank {environment.rank()} waits in comm.world()  at {line}")
        mine, deadline = {environment.rank()}, time.monotonic() + 10
        while signs(launcher) - mine and time.monotonic() < deadline:
            time.sleep(0.05)                      # my words hold as long as my sign is up
    os._exit(watch.TIMED_OUT)


def missing(ranks):
    """Name those that are not among these ranks, where all ranks are on this machine."""
    gone = sorted(set(range(environment.size() or 0)) - set(ranks))
    if environment.size() != environment.local_size() or not gone:
        return "a rank of this machine"
    return f"rank {', '.join(map(str, gone))}"


# -- signs --------------------------------------------------------------------------------------

def speaks(what):
    """Shall this process say what all may have to say?  Rank 0, or who has waited a second for it

    True where it cannot be known: rather twice than not at all.
    """
    launcher, rank = find_launcher(), environment.rank()
    if launcher is None:
        return True
    put_up(launcher, f"{rank}-{what}")
    deadline = time.monotonic() + (1 if rank else 0)
    while time.monotonic() < deadline and f"-{what}" not in shown(launcher):
        time.sleep(0.02)
    return put_up(launcher, what)


def linger(what):
    """Stay until all that still live have something to say, too, and know that it has been said."""
    launcher, deadline = find_launcher(), time.monotonic() + 3
    while launcher and time.monotonic() < deadline and (
            set(children(launcher) or ()) - signs(launcher, f"-{what}")):
        time.sleep(0.02)


def put_up(launcher, what):
    """Put up a sign that others can see -> False if such a one was there already"""
    sign = socket.socket(socket.AF_UNIX)
    try:
        sign.bind(f"\0{name_of(launcher)}-{what}")
    except OSError:
        return False
    _signs.append(sign)
    return True


def signs(launcher, what=""):
    """The ranks whose signs are up."""
    found = [re.fullmatch(rf"-(\d+){what}", sign) for sign in shown(launcher)]
    return {int(match[1]) for match in found if match}


def shown(launcher):
    """What the signs of a job say."""
    name = f"@{name_of(launcher)}"
    lines = (PROC / "net/unix").read_text().splitlines()
    return [line.partition(name)[2] for line in lines if name in line]


def name_of(launcher):
    """The name of a job: another one's launcher has another number, or began at another time."""
    began = (PROC / str(launcher) / "stat").read_text().rpartition(")")[2].split()[19]
    return f"minidist-{launcher}-{began}"


# -- the launcher's processes -------------------------------------------------------------------

def find_launcher():
    """The number of the process that started the ranks of this machine, or None."""
    if sys.platform != "linux" or not environment.launched():
        return None
    pid = os.getppid()
    try:
        while (PROC / str(pid) / "comm").read_text().strip() not in LAUNCHERS:     # a wrapper
            pid = int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:                               # no launcher that is known, up to process 0
        return None
    return pid


def children(launcher):
    """The living children of the launcher, {rank: process}; None where this cannot be seen."""
    try:
        tasks = list((PROC / str(launcher) / "task").iterdir())
        found = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    except OSError:
        return None
    return {rank_of(pid): pid for pid in found if watch.alive(pid)}


def rank_of(pid):
    """The rank of a process; of one that does not say, minus its number."""
    try:
        text = (PROC / str(pid) / "environ").read_text(errors="replace")
    except OSError:
        return -pid
    variable = environment.LAUNCHERS[environment.launcher()][0]
    found = re.search(rf"(?:^|\0){variable}=(\d+)", text)
    return int(found[1]) if found else -pid
