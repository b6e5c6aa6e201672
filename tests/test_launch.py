"""Planted failures: every job ends in time, not with status 0, leaves no process behind, and its
first screen names the rank, the operation and the line."""
import re
import signal
import sys

import pytest

from minidist.ranks import environment, launch
from tests import mpi

LIMIT = 1                       # MINIDIST_TIMEOUT
SCREEN = 24                     # lines


@pytest.fixture(autouse=True)
def _needs_mpi():
    mpi.need_mpi()


def fail(name, *words, ranks=3, supervised=True, sync=False, **options):
    """Run one failure -> (exit status, what is on the first screen)"""
    argv = [sys.executable, "-m", "tests.failures", name, *words]
    argv = [*argv, "-n", str(ranks)] if supervised else launch.command(ranks, argv)
    env = {"MINIDIST_TIMEOUT": str(LIMIT), "MINIDIST_SYNC": str(int(sync))}
    status, output = mpi.execute(argv, mpi.HANG, env, **options)
    assert status is not None, f"still running after {mpi.HANG} s:\n{output}"
    return status, "\n".join(output.splitlines()[:SCREEN])


def place(name):
    """The line that the report must point at."""
    lines = (mpi.ROOT / "tests/failures.py").read_text().splitlines()
    number = next(i for i, line in enumerate(lines, start=1) if line.endswith(f"# <- {name}"))
    return f"tests/failures.py:{number} in {name}"


WAITS = {
    "exits": (3, "rank 1 left with exit status 3", "rank 0 waits for rank 1, which has left"),
    "system_exit": (3, "rank 1 left with exit status 3", "rank 0 waits for rank 1, which has left"),
    "nobody_sends": (70, "rank 0 waits for rank 1, which has left"),
    "cycle": (70, "a cycle of receives", "rank 0 -> rank 2 -> rank 1 -> rank 0"),
    "send_first": (70, "all send first", "hangs only for large messages", "for rank 1 to receive"),
    "different_collectives": (70, "in broadcast #2", "in all_reduce #2",
                              "must make the same calls in the same order"),
    "leaves_early": (70, "rank 2 waits", "rank 0 waits for rank 1, which has left"),
    "never_sends_to_all": (70, "rank 2 waits", "for every rank of its group  exchange, group world",
                           "rank 0 waits for rank 1, which has left"),
    "computes": (70, "rank 1 computes", "rank 0 waits for rank 1, which computes at tests/fail"),
    "stream_waits": (70, "rank 0 (stream) waits", "has nothing to do there"),
    "os_exit": (None, "rank 1 died without a word", "rank 0 waits for rank 1"),
    "killed": (None, "rank 1 died without a word", "rank 0 waits for rank 1"),
    "killed_waiting": (None, "rank 1 died without a word", "rank 0 waits for rank 1, which died"),
    "bad_input_on_one": (2, "[rank 1] error: no file x.txt; give another", "in barrier #2"),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_supervisor_or_a_rank_tells(name):
    expected, *words = WAITS[name]
    status, screen = fail(name)
    assert status == expected or expected is None and status != 0, screen
    for word in [*words, place(name), "recv" if "send" not in name else "", "group world"]:
        assert word in screen, f"{word!r} is not in\n{screen}"
    assert screen.count("  cause:") == 1, screen
    assert screen.count("died without a word") <= 2, screen       # the first, and in the cause


def test_small_sends_in_a_cycle_hang_only_where_sends_are_synchronous():
    assert fail("send_small_first") == (0, "")
    status, screen = fail("send_small_first", sync=True)
    assert status == 70 and "all send first" in screen and place("send_small_first") in screen


@pytest.mark.parametrize("name", ["cycle", "exits"])
@pytest.mark.parametrize("how", ["", "bare"])
def test_also_under_plain_mpirun_and_from_a_script_of_ones_own(name, how):
    status, screen = fail(name, *[how] if how else [], supervised=False)
    assert status == WAITS[name][0], screen
    for word in [*WAITS[name][1:], place(name)]:
        assert word in screen


@pytest.mark.parametrize("supervised", [True, False])
def test_the_traceback_of_a_rank_that_raises_is_labelled(supervised):
    status, screen = fail("raises", supervised=supervised)
    assert status == 1
    assert "[rank 1] ValueError: boom" in screen and "sendrecv" in screen
    assert re.search(r'\[rank 1\]   File ".*failures.py", line \d+, in raises', screen)
    assert "rank 2 waits" in screen and "rank 1 raised ValueError: boom" in screen


def test_a_keyboard_interrupt_of_one_rank_is_an_error_like_any_other():
    status, screen = fail("keyboard_interrupt")
    assert status == 130 and "[rank 1] KeyboardInterrupt" in screen and "rank 0 waits" in screen


def test_an_error_of_all_ranks_is_shown_once():
    status, screen = fail("raises_everywhere")
    assert status == 1 and screen.count("] ValueError: boom") == 1
    assert all(f"rank {r} raised ValueError: boom" in screen for r in range(3))


@pytest.mark.parametrize("supervised", [True, False])
def test_a_job_that_ends_well_has_status_0_and_no_report(supervised):
    status, screen = fail("fine", supervised=supervised)
    assert status == 0 and screen == ""


@pytest.mark.parametrize("name, expected", [("exits_everywhere", 3), ("returns_a_status", 4)])
def test_a_status_of_all_ranks_is_the_jobs(name, expected):
    status, screen = fail(name)
    assert status == expected and "minidist:" not in screen


@pytest.mark.parametrize("how", ["", "bare"])
def test_bad_input_is_one_sentence_and_status_2(how):
    status, screen = fail("bad_input", *[how] if how else [])
    assert status == 2
    assert screen.count("error: 6 heads do not split over 4 ranks; use 2 or 3") == 1
    assert "Traceback" not in screen and "minidist:" not in screen


@pytest.mark.parametrize("supervised", [True, False])
def test_the_first_ctrl_c_ends_the_job_and_says_where_it_was(supervised):
    status, screen = fail("interrupted", interrupt="waiting", supervised=supervised)
    assert status == 128 + signal.SIGINT or not supervised and status != 0
    assert "the job was stopped (SIG" in screen and "rank 0 waits" in screen
    assert place("interrupted") in screen


# -- the command line ---------------------------------------------------------------------------

def command(monkeypatch, *words, launched=None):
    monkeypatch.setattr(sys, "argv", ["lesson", *words])
    for name in environment.RANK + environment.SIZE:
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
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(launch.BadInput, match="has no mpi4py: pip install"):
        launch.command(2, [])
