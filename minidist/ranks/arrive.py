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


def wait_for_all():
    """Return when all that the launcher started on this machine are here, or end this process."""
    job, size, rank = find_job(), environment.local_size(), environment.rank()
    if job is None or size is None or not job.put_up(rank) or rank not in job.ranks():
        return
    began = complete = time.monotonic()
    while len(here := job.ranks()) < size:
        now, timeout = time.monotonic(), environment.timeout()
        time.sleep(min(0.02 + (now - began) / 8, 0.25))        # many ranks look at each other
        living = job.living()
        complete = now if living is None or len(living) >= size else complete
        if now - complete > (min(MISSING, timeout / 2) or MISSING):
            give_up(job, now - began, missing(living), ", which ended before it came there")
        if timeout and now - began > max(timeout, STARTING):
            give_up(job, now - began, missing(here), f"; MINIDIST_TIMEOUT={timeout:g}")


def give_up(job, seconds, whom, why):
    """Say where this process waits, and for whom, unless another has said so; and end."""
    rank = environment.rank()
    if job.put_up("report"):
        where = f"in comm.world()  at {report.user_line(sys._getframe())}"
        watch.last_words(f"minidist: rank {rank} has waited {seconds:.1f} s in comm.world() for "
                         f"{whom}{why}; the job ends\n  rank {rank} waits {where}")
        deadline = time.monotonic() + 10
        while job.ranks() - {rank} and time.monotonic() < deadline:
            time.sleep(0.05)                      # who comes later sees that all has been said
    os._exit(watch.TIMED_OUT)


def missing(ranks):
    """Name those that are not among these ranks, where all ranks are on this machine."""
    gone = sorted(set(range(environment.size() or 0)) - set(ranks))
    if environment.size() != environment.local_size() or not gone:
        return "a rank of this machine"
    return f"rank {', '.join(map(str, gone))}"


# -- who speaks for all -------------------------------------------------------------------------

def speaks(what):
    """Shall this process say what all may have to say?  Rank 0, or who has waited a second for it

    True where it cannot be known: rather twice than not at all.
    """
    job, rank = find_job(), environment.rank()
    if job is None:
        return True
    job.put_up(f"{rank}-{what}")
    deadline = time.monotonic() + (1 if rank else 0)
    while time.monotonic() < deadline and f"-{what}" not in job.signs():
        time.sleep(0.02)
    return job.put_up(what)


def linger(what):
    """Stay until all that still live have something to say, too, and know that it has been said."""
    job, deadline = find_job(), time.monotonic() + 3
    while job and time.monotonic() < deadline and set(job.living() or ()) - job.ranks(f"-{what}"):
        time.sleep(0.02)


# -- what the processes of one launcher see of each other ---------------------------------------

class Job:
    """The processes that one launcher started on this machine.  pid: the launcher's"""
    up = []                                       # my own signs, for as long as this process lives

    def __init__(self, pid):
        began = parts(pid)[19]                    # another launcher may get the same number, later
        self.pid, self.name = pid, f"minidist-{pid}-{began}"

    def put_up(self, what):
        """Put up a sign that others can see -> False if such a one was there already"""
        sign = socket.socket(socket.AF_UNIX)
        try:
            sign.bind(f"\0{self.name}-{what}")
        except OSError:
            return False
        self.up.append(sign)
        return True

    def signs(self):
        """What the signs of all processes say."""
        try:
            lines = (PROC / "net/unix").read_text().splitlines()
        except OSError:
            return []
        return [line.partition(f"@{self.name}")[2] for line in lines if self.name in line]

    def ranks(self, what=""):
        """The ranks that have put up such a sign."""
        found = [re.fullmatch(rf"-(\d+){what}", sign) for sign in self.signs()]
        return {int(match[1]) for match in found if match}

    def living(self):
        """The launcher's living children, {rank: process}; None where this cannot be seen."""
        try:
            tasks = list((PROC / str(self.pid) / "task").iterdir())
            found = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        except OSError:
            return None
        return {rank_of(pid): pid for pid in found if watch.alive(pid)}


def find_job():
    """The job that this process is a rank of, or None where it is none or cannot be seen."""
    if sys.platform != "linux" or not environment.launched() or not hasattr(socket, "AF_UNIX"):
        return None
    pid = os.getppid()
    try:
        while (PROC / str(pid) / "comm").read_text().strip() not in LAUNCHERS:     # a wrapper
            pid = int(parts(pid)[1])
        return Job(pid)
    except OSError:                               # no launcher that is known, up to process 0
        return None


def parts(pid):
    """What the system tells of a process, after its name: state, parent, ... (man proc)"""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def rank_of(pid):
    """The rank of a process; of one that does not say, minus its number."""
    try:
        text = (PROC / str(pid) / "environ").read_text(errors="replace")
    except OSError:
        return -pid
    variable = environment.LAUNCHERS[environment.launcher()][0]
    found = re.search(rf"(?:^|\0){variable}=(\d+)", text)
    return int(found[1]) if found else -pid
