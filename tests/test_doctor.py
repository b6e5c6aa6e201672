"""The doctor: what it finds here, and what it says where something is missing or does not fit."""
import os
import stat
import subprocess
import sys

import pytest

from minidist import doctor
from minidist.ranks import environment
from tests import mpi


def test_it_prints_the_command_that_works_here():
    mpi.need_mpi()
    done = subprocess.run([sys.executable, "-m", "minidist.doctor"], cwd=mpi.ROOT, text=True,
                          capture_output=True, timeout=mpi.HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("Python", "NumPy", "BLAS", "per rank: 1", "linked with", "mpiexec", "cores",
                 "as a process of its own", "-m lessons.ring -n 4\n", "and, by hand:"):
        assert word in done.stdout, done.stdout
    by_hand = done.stdout.partition("by hand:")[2].strip()
    status, output = mpi.execute(by_hand.replace("-m lessons.ring", "-m minidist.doctor").split())
    assert status == 0 and "as one of 4 ranks" in output and output.count("Python") == 1, output


@pytest.mark.parametrize("absent, told", [
    ("mpi4py", "Problem: there is no mpi4py"), ("mpiexec", "Problem: there is no mpiexec beside")])
def test_what_is_missing_is_one_sentence(absent, told, monkeypatch, capsys):
    if absent == "mpi4py":
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    else:
        mpi.need_mpi()
        monkeypatch.setattr(environment, "mpiexec", lambda: None)
    assert doctor.main() == 1
    out = capsys.readouterr().out
    assert told in out and "pip install" in out and "works here" not in out


@pytest.mark.parametrize("variables, started, told", [
    ("RANK=0 WORLD_SIZE=2", "by torchrun, as one of 2 ranks", "torchrun is not the launcher of"),
    ("SLURM_PROCID=0 SLURM_NTASKS=8", "by srun, as one of 8 ranks", "srun is not the launcher of"),
    ("PMIX_RANK=1", "", ""),                                   # rank 0 speaks
    ("SLURM_JOB_ID=17 SLURM_NTASKS=8", "in job 17 of SLURM", "-m lessons.ring -n 4"),
    ("JPY_PARENT_PID=1", "in a notebook", "In a cell:         comm.run_threads(4, fn)")])
def test_it_says_who_has_started_it_and_what_works_there(variables, started, told):
    mpi.need_mpi()
    env = {**os.environ, **dict(pair.split("=") for pair in variables.split())}
    done = subprocess.run([sys.executable, "-m", "minidist.doctor"], cwd=mpi.ROOT, text=True,
                          capture_output=True, timeout=mpi.HANG, env=env)
    assert started in done.stdout and told in done.stdout, done.stdout
    assert done.returncode == (0 if "lessons.ring -n 4" in done.stdout else 1)


def test_ranks_that_cannot_start_for_want_of_memory(monkeypatch, capsys):
    mpi.need_mpi()
    monkeypatch.setattr(environment, "cramped", lambda: "/dev/shm has 0.1 MB free")
    monkeypatch.setattr(doctor, "TRIAL", "raise SystemExit('a banner')")
    assert doctor.main() == 1
    assert "find each other (status 1): /dev/shm has 0.1 MB free" in capsys.readouterr().out


def test_a_launcher_of_another_mpi_is_found_out(monkeypatch, capsys, tmp_path):
    """It starts every process as rank 0 of 1, as MPICH's does for Open MPI's library."""
    mpi.need_mpi()
    fake = tmp_path / "mpiexec"
    fake.write_text('#!/bin/sh\nshift 2\nexport PMI_RANK=0 PMI_SIZE=2\nexec "$@"\n')
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(environment, "mpiexec", lambda: str(fake))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert doctor.main() == 1
    out = capsys.readouterr().out
    assert "did not find each other (status 2): error: every rank believes it is rank 0 of 1" in out
    assert "this mpirun is not the launcher of" in out
    assert " -n 2, or no launcher but -n" in out or "brings it" in out
