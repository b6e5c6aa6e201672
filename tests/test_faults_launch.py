"""Faults that outsiders found in starting, stopping and reporting: L1 to L16 (L17: collectives).

What ends a rank, and what is then seen, is a table: tests/test_failures.py."""
import os
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from minidist import BadInput
from minidist.ranks import arrive, comm, environment, report, safety, watch
from tests import mpi

BARE = {"PATH", "HOME", "LANG", "TMPDIR"} & set(os.environ)        # no launcher, no setting


def python(code, *words, env=None, **files):
    """Run code in a fresh Python -> (status, stdout, stderr).  files: modules that it can import"""
    with mpi.tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (mpi.Path(folder) / f"{name}.py").write_text(textwrap.dedent(text))
        env = {**{k: os.environ[k] for k in BARE}, "PYTHONPATH": f"{folder}{os.pathsep}{mpi.ROOT}",
               **(env or {})}
        argv = [sys.executable, *(["-c", textwrap.dedent(code)] if code else []), *words]
        done = subprocess.run(argv, cwd=mpi.ROOT, env=env, text=True, capture_output=True,
                              timeout=mpi.HANG, stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout, done.stderr


WORLD = "from minidist.ranks import comm, launch; launch.run(lambda: print(comm.world().size))"

# What other systems than Linux lack, taken away before anything is imported.
ELSEWHERE = """
    import os, select, socket, sys
    sys.modules["fcntl"] = None
    for module, name in ((os, "sched_getaffinity"), (os, "pidfd_open"), (os, "statvfs"),
                         (socket, "AF_UNIX"), (select, "poll")):
        if hasattr(module, name):
            delattr(module, name)
"""


# -- L1: what a system may lack -----------------------------------------------------------------

def test_L1_commands_run_where_system_calls_are_missing():
    for words in ["-m", "minidist.mesh", "--dp", "2"], ["-m", "minidist.train", "--help"]:
        status, out, err = python("", *words, sitecustomize=ELSEWHERE)
        assert status == 0 and out and err == ""
    assert python("import minidist.bench.collectives", sitecustomize=ELSEWHERE)[0] == 0


@pytest.mark.parametrize("name, expected", [("fine", 0), ("killed_waiting", None)])
def test_L1_a_job_is_watched_where_system_calls_are_missing(name, expected):
    """A healthy job ends well, and of one that fails the first death is told, by polling."""
    mpi.need_mpi()
    status, out, err = python("", "-m", "tests.failures", name, "-n", "3", sitecustomize=ELSEWHERE)
    assert status == expected if expected is not None else status > 0, err
    assert ("died without a word" in err) == (name == "killed_waiting"), err


def test_L1_a_refused_socket_is_no_death(monkeypatch):
    def refuse(*_):
        raise PermissionError("not permitted")
    monkeypatch.setattr(watch.socket, "socket", refuse)
    assert watch.listen("x") is None and watch.call("x", 0) is None and not watch.hung_up(None)


# -- L2, L10: who has started this process ------------------------------------------------------

STARTED = {
    "PMI_RANK=1 PMI_SIZE=4": ("mpirun", 1, 4),
    "PMI_RANK=0 PMI_SIZE=1": ("mpirun", 0, 1),
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 PMIX_RANK=1": ("Open MPI's mpirun", 1, 4),
    "SLURM_PROCID=1 SLURM_NTASKS=2": ("srun", 1, 2),
    "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=8 ENVIRONMENT=BATCH": ("srun", 1, 2),
    "SLURM_PROCID=0 SLURM_NTASKS=8 ENVIRONMENT=BATCH": (None, 0, None),       # the batch script
    "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=8": (None, 0, None),  # salloc's own shell
    "SLURM_NTASKS=8": (None, 0, None),
    "SLURM_PROCID=0 SLURM_NTASKS=2 PMI_RANK=3 PMI_SIZE=4": ("mpirun", 3, 4),  # mpirun inside a job
    "SLURM_PROCID=1 SLURM_NTASKS=2 PMIX_RANK=1": ("srun", 1, 2),
    "PMIX_RANK=1": ("PMIx", 1, None),
    "RANK=1 WORLD_SIZE=2": ("torchrun", 1, 2),
    "RANK=0 WORLD_SIZE=1": (None, 0, None),
    "RANK=first WORLD_SIZE=2": (None, 0, None),
    "": (None, 0, None),
}


@pytest.mark.parametrize("variables", STARTED)
def test_L2_the_launcher_is_known_by_its_variables(variables, monkeypatch):
    for name in {*sum(environment.LAUNCHERS.values(), ()), "ENVIRONMENT"}:
        monkeypatch.delenv(name, raising=False)
    for pair in variables.split():
        monkeypatch.setenv(*pair.split("="))
    found = environment.launcher(), environment.rank(), environment.size()
    assert found == STARTED[variables] and environment.launched() == (found[0] is not None)


@pytest.mark.parametrize("variables, told", [
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "srun is not the launcher of"),
    ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "srun is not the launcher of"),
    ({"PMIX_RANK": "1"}, "PMIx is not the launcher of"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "unset RANK and WORLD_SIZE")])
def test_L2_processes_that_mpi_did_not_join_are_refused(variables, told):
    """Not two trainings of one rank each, which write the same files."""
    mpi.need_mpi()
    status, out, err = python(WORLD, env=variables)
    assert status == 2 and told in err and err.count("error: ") == 1 and "Traceback" not in err
    assert "-n 2" in err or "-n 4" in err


# -- L3, L4: MPI that is not there, or not all there --------------------------------------------

def without_library(code, *words, **variables):
    """Run code where mpi4py is installed and finds no MPI."""
    return python("""
        import mpi4py, sys
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "mpi4py.MPI":
                    raise RuntimeError("cannot load MPI library")
        sys.meta_path.insert(0, Finder())
        """ + code, *words, env=variables)


def test_L3_without_an_mpi_library_one_process_runs_and_several_are_told():
    mpi.need_mpi()
    code = "\n        " + WORLD
    assert without_library(code) == (0, "1\n", "")
    status, out, err = without_library(code, PMI_RANK="0", PMI_SIZE="2")
    assert status == 2 and "cannot load MPI library" in err and "pip install" in err
    assert err.startswith("error: ") and err.count("\n") == 1
    status, out, err = without_library("\n        from minidist import doctor; doctor.main()")
    assert "Problem: mpi4py finds no MPI library: pip install mpich" in out and "run_threads" in out


def test_L4_streams_need_all_of_mpis_threads():
    mpi.need_mpi()
    status, _, err = python("""
        import mpi4py
        mpi4py.rc.thread_level = "serialized"
        from mpi4py import MPI
        from minidist.ranks import comm, launch
        launch.run(lambda: comm.world().stream() and None)""", env=environment.SETTINGS)
    assert status == 2 and 'streams need MPI\'s thread level "multiple"' in err
    assert '"serialized"' in err and err.count("\n") == 1


# -- L5, L6: terminals and pipes ----------------------------------------------------------------

@pytest.mark.parametrize("mine, launchers, shown", [
    (False, None, False), (True, None, True), (True, "/dev/pts/3", True), (True, "/dev/tty1", True),
    (True, "pipe:[123]", False), (True, "/tmp/log", False), (True, OSError(), False)])
def test_L5_the_terminal_that_open_mpi_gives_its_ranks_is_none(mine, launchers, shown, monkeypatch):
    def readlink(path):
        if isinstance(launchers, OSError):
            raise launchers
        return launchers
    monkeypatch.setattr(environment.sys.stdout, "isatty", lambda: mine, raising=False)
    monkeypatch.setattr(environment.os, "readlink", readlink)
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    if launchers is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert environment.on_terminal() == shown


@pytest.mark.parametrize("words", ["lessons", "minidist.mesh --help", "minidist.doctor",
                                   "minidist.train --preset lesson --steps 9 --no-figure"])
def test_L6_a_command_whose_reader_leaves_ends_without_a_word(words):
    code = f'"{sys.executable}" -m {words} | head -n 1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", code], cwd=mpi.ROOT, text=True, capture_output=True,
                          timeout=mpi.HANG)
    assert done.stdout.count("\n") == 1 and done.stderr == ""
    assert done.returncode in (141, 0)                       # 0: it had ended before


# -- L7: settings that are no numbers -----------------------------------------------------------

@pytest.mark.parametrize("name, value", [
    ("MINIDIST_TIMEOUT", "abc"), ("MINIDIST_TIMEOUT", "-5"), ("MINIDIST_TIMEOUT", "nan"),
    ("MINIDIST_TIMEOUT", "inf"), ("MINIDIST_PIECE", "1e6"), ("MINIDIST_PIECE", "0"),
    ("MINIDIST_CHECK", "yes"), ("MINIDIST_SYNC", "2")])
def test_L7_a_wrong_setting_is_refused(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=f"{name}={value}: give .*, or leave it unset"):
        environment.check_settings()


def test_L7_settings_that_are_fine(monkeypatch):
    for name in "TIMEOUT", "PIECE", "CHECK", "SYNC":
        monkeypatch.delenv(f"MINIDIST_{name}", raising=False)
    environment.check_settings()
    assert environment.timeout() == 60 and environment.piece() == 2**30
    monkeypatch.setenv("MINIDIST_TIMEOUT", "0")
    monkeypatch.setenv("MINIDIST_CHECK", "1")
    assert environment.timeout() == 0 and environment.check() and not environment.sync()


@pytest.mark.parametrize("how", ["launch.run(comm.world)", "comm.world()"])
def test_L7_a_wrong_setting_is_one_sentence_also_in_a_script_of_ones_own(how):
    status, _, err = python(f"from minidist.ranks import comm, launch; {how}",
                            env={"MINIDIST_PIECE": "many"})
    assert status == 2 and err.startswith("error: MINIDIST_PIECE=many: ") and err.count("\n") == 1


# -- L8, L9: what slows ranks down, or keeps them from starting ---------------------------------

def test_L8_little_shared_memory_is_named_with_the_remedy(monkeypatch):
    real = os.statvfs("/dev/shm")
    small = os.statvfs_result((*real[:4], 16, *real[5:]))     # sixteen free blocks
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    assert "/dev/shm" in environment.cramped() and "MB free" in environment.cramped()
    assert "--shm-size" in environment.cramped()
    monkeypatch.setattr(environment, "LITTLE", 0)
    assert environment.cramped() == ""


def test_L9_numpy_imported_first_is_told_once():
    threads = "comm.run_threads(2, lambda comm: 0)"
    code = ("import numpy\nfrom minidist.ranks import environment, comm\n"
            "environment.cores = lambda: 8")
    _, _, err = python(f"{code}\n{threads}\n{threads}")
    assert err.count("\n") == 1 and "import minidist before numpy, or set OMP_NUM_THREADS=1" in err
    assert python(f"{code}\n{threads}", env={"OMP_NUM_THREADS": "1"})[2] == ""
    assert python(f"{code}\ncomm.run_threads(1, lambda comm: 0)")[2] == ""
    assert python(f"from minidist.ranks import comm\n{threads}")[2] == ""


# -- L11, L14: before the ranks have joined -----------------------------------------------------

def test_L11_who_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(environment, "size", lambda: 4)
    monkeypatch.setattr(environment, "local_size", lambda: 4)
    assert arrive.missing({0, 2}) == "rank 1, 3" and arrive.missing({0, 1, 3, -77}) == "rank 2"
    monkeypatch.setattr(environment, "local_size", lambda: 2)       # others are elsewhere
    assert arrive.missing({0}) == "a rank of this machine"


def test_L14_one_of_the_ranks_speaks(monkeypatch):
    """Rank 0 at once, another only where rank 0 has not spoken within a second."""
    job = arrive.Job(os.getpid())
    monkeypatch.setattr(arrive, "find_job", lambda: job)
    monkeypatch.setattr(arrive.Job, "up", [])
    monkeypatch.setattr(environment, "rank", lambda: 2)
    began = time.monotonic()
    assert arrive.speaks("first") and time.monotonic() - began > 0.9
    monkeypatch.setattr(environment, "rank", lambda: 0)
    assert not arrive.speaks("first") and arrive.speaks("second")
    monkeypatch.setattr(environment, "rank", lambda: 2)
    assert not arrive.speaks("second") and job.ranks("-second") == {0, 2} and job.ranks() == set()
    for sign in job.up:
        sign.close()


# -- L12: the reporter cannot be muted ----------------------------------------------------------

class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.fixture
def waiting(monkeypatch):
    """A watchdog whose rank waits in a call with arguments of any kind -> (dog, aborted, table)"""
    monkeypatch.setattr(watch.Watchdog, "run", lambda self: None)
    monkeypatch.setenv("MINIDIST_TIMEOUT", "0.01")
    path, status, aborted = watch.create(2), report.Status(threading.get_ident()), []
    table = watch.Table(path)
    yield watch.Watchdog(table, 0, [status], aborted.append), status, aborted
    os.unlink(path)


def group(name, current):
    """As much of a Comm of two ranks as a report reads."""
    return SimpleNamespace(name=name, ranks=(0, 1), current=lambda: current)


MUTES = {
    "a float as rank": (1.0, "all_reduce", None), "no rank at all": ("left", "all_reduce", None),
    "a detail that cannot be printed": (1, "all_reduce", Unprintable()),
    "half a character": (1, "\udce4", "\udce4"),
}


@pytest.mark.parametrize("name", MUTES)
def test_L12_a_hang_is_reported_whatever_the_call_was_given(name, waiting, capfd):
    dog, status, aborted = waiting
    peer, op, detail = MUTES[name]
    status.now = group(op, (op, 1, detail)), "recv", None, peer, 80
    dog.look()
    time.sleep(0.05)
    dog.look()
    told = capfd.readouterr().err
    assert aborted == [watch.TIMED_OUT] and "longer than MINIDIST_TIMEOUT=0.01" in told
    assert "rank 0" in told.partition("\n")[2]
    assert name != "a float as rank" or "for a message from rank 1  recv" in told


def test_L12_a_watchdog_outlives_an_error_of_its_own(waiting, monkeypatch):
    dog, _, _ = waiting
    seen = []

    def fail():
        seen.append(1)
        raise OSError("no more files") if len(seen) < 3 else SystemExit
    monkeypatch.undo()
    monkeypatch.setattr(dog, "look", fail)
    with pytest.raises(SystemExit):
        dog.run()
    assert len(seen) == 3


def test_L12_what_cannot_be_reported_still_ends_the_job(waiting, monkeypatch, capfd):
    dog, _, aborted = waiting
    monkeypatch.setattr(report, "explain", lambda *_: 1 / 0)
    dog.bark("the headline")
    assert aborted == [watch.TIMED_OUT] and "the headline\n" in capfd.readouterr().err


@pytest.mark.parametrize("peer", [0.5, -1, 2, float("nan"), "0", None])
def test_L12_what_is_no_rank_is_refused(peer):
    """MPI would have sent to rank 0 what is meant for rank 0.5."""
    def body(comm):
        x, y = np.ones(2), np.empty(2)
        for call in (lambda: comm.send(x, peer), lambda: comm.recv(y, peer),
                     lambda: comm.isend(x, peer), lambda: comm.irecv(y, peer),
                     lambda: comm.sendrecv(x, peer, y, 0), lambda: comm.sendrecv(x, 0, y, peer),
                     lambda: comm.exchange([(x, 0, y, peer), (x, 1, y.copy(), 1)])):
            with pytest.raises(ValueError, match=f"rank {peer}: group world has ranks 0 to 1"):
                call()
    comm.run_threads(2, body)


def test_L12_speaking_never_raises(monkeypatch):
    def closed(*_):
        raise OSError("closed")
    monkeypatch.setattr(os, "write", closed)
    watch.say("to nobody")


# -- L13: a message longer than its buffer ------------------------------------------------------

@mpi.mpi(2)
def test_L13_nothing_is_written_behind_a_buffer(comm):
    """Open MPI copied 9000 bytes more than the buffer of 8 had room for."""
    room = np.zeros(4096, "u1")
    if comm.rank == 0:
        comm.send(np.full(9000, 7, "u1"), 1)
    else:
        with pytest.raises(ValueError, match="expected 8 uint8 from rank 0, but got"):
            comm.recv(room[:8], 0)
        assert not room[8:].any()


# -- L15: statuses and signals (the signals: test_failures) -------------------------------------

@pytest.mark.parametrize("code, status", [
    (None, 0), (0, 0), (3, 3), (True, 1), (256, 1), (512, 1), (-1, 255), (257, 1), ("text", 1)])
def test_L15_no_status_but_0_becomes_0(code, status):
    assert safety.exit_status(code) == status


def test_L15_a_command_that_returns_256_has_not_ended_well():
    assert python("from minidist.ranks import launch; launch.run(lambda: 256)")[0] == 1


# -- L16: honest work ---------------------------------------------------------------------------

def test_L16_who_waits_for_work_of_any_length_is_not_reported(waiting, monkeypatch):
    dog, status, aborted = waiting
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda _: None)
    status.now = group("world", ("", 0, None)), "recv", None, 1, 80
    busy = report.Status(threading.get_ident())

    def later():
        dog.table.write(1, [report.row(1, busy)])
        dog.look()
        clock[0] += 0.6
    dog.timeout = 1
    with report.at_work(busy, "trains the twin"):
        for _ in range(3):
            later()
        assert "rank 1 trains the twin  at" in dog.table.story("")
        assert "cause: rank 0 waits for rank 1, which trains the twin at" in dog.table.story("")
    later()
    assert not aborted                             # the wait counts from the end of the work
    for _ in range(3):
        later()
    assert aborted == [watch.TIMED_OUT]


def test_L16_a_ranks_long_work_is_said_by_its_communicator():
    def work(comm):
        with comm.at_work("trains the twin"):
            return comm._status.work
    assert comm.run_threads(2, work) == ["trains the twin"] * 2


def test_L16_the_line_in_a_command_of_ours_is_one_of_ours():
    """No line of the reader's is below: then not one of Python's or of the ranks' room."""
    told = []
    names = {"report": report, "sys": sys, "told": told}
    for file, text in (("ranks/x.py", "def wait(): told.append(report.user_line(sys._getframe()))"),
                       ("train.py", "def train(): wait()")):
        exec(compile(text, report.HERE + file, "exec"), names)
    thread = threading.Thread(target=names["train"])
    thread.start()
    thread.join()
    assert told == ["train.py:1 in train"] or told[0].endswith("minidist/train.py:1 in train")
