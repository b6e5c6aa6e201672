"""Starting ranks: the command line, and the process that watches over the job.

What it says when a rank fails: tests/test_failures.py."""
import sys

import pytest

from minidist.ranks import environment, launch
from tests import mpi


def fail(name, sync=False):
    """Run one failure on three ranks -> (exit status, everything printed)"""
    argv = [sys.executable, "-m", "tests.failures", name, "-n", "3"]
    return mpi.execute(argv, env={"MINIDIST_TIMEOUT": "1", "MINIDIST_SYNC": str(int(sync))})


def test_small_sends_in_a_cycle_hang_only_where_sends_are_synchronous():
    mpi.need_mpi()
    assert fail("send_small_first") == (0, "")
    status, screen = fail("send_small_first", sync=True)
    assert status == 70 and "all send first" in screen and "in send_small_first" in screen


# -- the command line ---------------------------------------------------------------------------

def command(monkeypatch, *words, launched=None):
    monkeypatch.setattr(sys, "argv", ["lesson", *words])
    for name in sum(environment.LAUNCHERS.values(), ()):
        monkeypatch.delenv(name, raising=False)
    if launched:
        monkeypatch.setenv("PMI_RANK", "0")
        monkeypatch.setenv("PMI_SIZE", str(launched))
    return launch.wanted_ranks()


def test_n_is_taken_off_the_command_line(monkeypatch):
    assert command(monkeypatch, "--seed", "3", "-n", "4", "--json", "x") == 4
    assert sys.argv == ["lesson", "--seed", "3", "--json", "x"]
    assert command(monkeypatch, "--seed", "3") is None
    assert command(monkeypatch, "-n", "4", launched=4) is None and sys.argv == ["lesson"]


@pytest.mark.parametrize("words, launched, told", [
    (["-n"], None, "-n : give the number"), (["-n", "x"], None, "-n x: give the number"),
    (["-n", "0"], None, "-n 0: give the number"), (["-n", "2"], 4, "mpirun has started 4 ranks")])
def test_a_wrong_n_is_refused(monkeypatch, words, launched, told):
    with pytest.raises(launch.BadInput, match=told):
        command(monkeypatch, *words, launched=launched)


def test_the_rest_of_the_command_is_kept(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", "python -X dev -m x -n 4 --seed 1".split())
    assert launch.rest_of_command() == ["-X", "dev", "-m", "x", "--seed", "1"]


def test_without_mpi_a_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr(environment, "mpiexec", lambda: None)
    with pytest.raises(launch.BadInput, match="no mpiexec beside this Python or on PATH"):
        launch.command(2, [])
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(launch.BadInput, match="has no mpi4py: pip install"):
        launch.command(2, [])
