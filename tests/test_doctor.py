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
    for word in "Python", "NumPy", "BLAS", "per rank: 1", "linked with", "mpiexec", "cores":
        assert word in done.stdout
    assert done.stdout.rstrip().endswith("-m lessons.ring -n 4")


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
