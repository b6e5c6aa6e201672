"""Planted failures, as a table: what ends a rank x who started the ranks (x MPICH or Open MPI).

Every job ends in time, not with status 0, leaves no process and no file behind, and its first
screen names the rank, the operation and the line. Jobs wait more than they compute, so several run
at once; each is a test of its own all the same.
"""
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from minidist.ranks import launch
from tests import mpi

SCREEN = 24                     # lines
AT_ONCE = 6                     # jobs
OPEN_MPIS_STACK = r"\[\S+:\d+\] "         # its lines about a crash, which come before any of ours
LIMITS = {"stops": "4", "interrupted": "60"}          # MINIDIST_TIMEOUT, where it is not 1
ANY, BAD = range(256), range(1, 256)        # statuses
DIED = r"rank 1 died without a word"
LEFT = r"rank \d+ waits for rank 1, which has left"

# What ends a rank -> the job's status (None: any but 0), and what the first screen says, as regular
# expressions; @NAME is the line of tests/failures.py that ends with "# <- NAME".
TABLE = {
    "raises": (1, "rank 1 raised ValueError: boom", r"\[rank 1\] ValueError: boom", "sendrecv",
               "@raises"),
    "exits": (3, "rank 1 left with exit status 3", LEFT, "recv, 80 bytes", "@exits"),
    "os_exit": (None, DIED, "recv, 80 bytes", "@os_exit"),
    "os_exits_7": (None, DIED, "recv, 80 bytes", "@os_exits_7"),
    "killed": (None, DIED, "recv, 80 bytes", "@killed"),
    "crashes": (None, DIED, "recv, 80 bytes", "@crashes"),
    "stops": (70, "rank 1 computes", "no sign of life for", "recv, 80 bytes", "@stops"),
    "nobody_sends": (70, "rank 0 waits for rank 1, which has left", "recv", "@nobody_sends"),
    "cycle": (70, "a cycle of receives", "rank 0 -> rank 2 -> rank 1 -> rank 0", "recv", "@cycle"),
    "different_collectives": (70, "in broadcast #2", "in all_reduce #2", "must make the same calls",
                              "@different_collectives"),
    "leaves_early": (70, "rank 2 waits", LEFT, "recv", "@leaves_early"),
    "error_in_stream": (1, "rank 1 raised ValueError: boom", r"rank 0 \(stream\) waits .* recv",
                        "@error_in_stream"),
    "error_in_hook": (1, "rank 1 raised ValueError: boom", "recv, 80 bytes", "@error_in_hook"),
    "full_disk": (1, "rank 1 raised OSError: .* No space left", "recv, 80 bytes", "@full_disk"),
    "interrupted": (130, r"the job was stopped \(SIG", "rank 0 waits", "recv", "@interrupted"),
    "closed_pipe": (141, "nobody reads what this job prints"),
}
# What is seen instead where plain mpirun has started the ranks, and no process of ours outlives
# them. Open MPI's ends them so that they can report. MPICH's kills them: with a banner for a
# signal, else without a word, after os._exit(0) sometimes even with status 0.
PLAIN = {
    **dict.fromkeys(["killed", "crashes"], (None, f"{DIED}|BAD TERMINATION OF ONE OF YOUR")),
    "os_exit": (ANY,),
    "os_exits_7": (None,),
    "interrupted": (None, *TABLE["interrupted"][1:]),
    "closed_pipe": (None,),                             # as quiet as `yes | head -n 1`
}
# What happens to rank 1 before it has joined the others, who wait in comm.world(). Open MPI ends
# them before they can say so when it has left with a status.
WAITED = r"rank \d has waited .* in comm.world\(\) for rank 1, which ended before"
EARLY = {
    "early_return": (None, WAITED, "@main"),
    "early_os_exit": (None, WAITED, "@main"),
    "early_exit": (None, WAITED + r"|,1\]\s+Exit code: +3"),
    "early_error": (None, r"\[rank 1\] ValueError: boom", "@early_error"),
    "early_import": (None, r"\[rank 1\] .*No module named 'no_such_module'", "@early_import"),
    "early_bad_input": (None, r"\[rank 1\] error: no file x.txt; give another"),
}
# More of what a supervisor or a rank has to tell apart.
MORE = {
    "system_exit": (3, "rank 1 left with exit status 3", LEFT, "recv", "@system_exit"),
    "exits_256": (1, "rank 1 left with exit status 1", LEFT, "recv", "@exits_256"),
    "send_first": (70, "all send first", "hangs only for large", "for rank 1 to receive",
                   "@send_first"),
    "never_sends_to_all": (70, "rank 2 waits", "for every rank of its group  exchange, group world",
                           LEFT, "@never_sends_to_all"),
    "computes": (70, "rank 1 computes", "waits for rank 1, which computes at tests/fail",
                 "@computes"),
    "stream_waits": (70, r"rank 0 \(stream\) waits", "has nothing to do there", "@stream_waits"),
    "killed_waiting": (None, DIED, "waits for rank 1, which died", "@killed_waiting"),
    "bad_input_on_one": (2, r"\[rank 1\] error: no file x.txt; give another", "in barrier #2",
                         "@bad_input_on_one"),
    "keyboard_interrupt": (130, r"\[rank 1\] KeyboardInterrupt", "rank 0 waits"),
    "raises_half_a_character": (1, r"raised ValueError: no file \\udce4", "recv, 80 bytes",
                                "@raises_half_a_character"),
    "raises_unprintable": (1, "rank 1 raised Unprintable", "recv, 80 bytes", "@raises_unprintable"),
    "raises_in_no_folder": (1, "raised ValueError: boom", "in raises_in_no_folder"),
    "closes_stderr": (1, "raised ValueError: boom", "recv, 80 bytes", "@closes_stderr"),
    "float_as_rank": (70, "rank 0 waits for rank 1, which has left", "@float_as_rank"),
    "raises_everywhere": (1, *(f"rank {r} raised ValueError: boom" for r in range(3))),
}
# What needs no report.
QUIET = {"fine": (0,), "exits_everywhere": (3,), "returns_a_status": (4,),
         "bad_input": (2, "error: 6 heads do not split over 4 ranks; use 2 or 3"),
         "early_bad_input_of_all": (2, "error: 6 heads do not split over 4 ranks; use 2 or 3")}
# A signal to the supervisor alone, as `kill` sends it: how it is named here -> what comes of it.
STOPPED = r"the job was stopped \(SIG", "rank 0 waits", "recv", "@interrupted"
SIGNALS = {"SIGINT": (130, *STOPPED), "SIGTERM": (143, *STOPPED), "SIGHUP": (129, *STOPPED),
           "SIGKILL": (-9, "the process that started this job has been killed", *STOPPED[1:])}
ALL = {**TABLE, **EARLY, **MORE, **QUIET}
CELLS = [(name, how) for name in {**TABLE, **EARLY, **QUIET} for how in ("-n", "mpirun")]
CELLS += [(name, "-n") for name in MORE]
CELLS += [("interrupted", how) for how in SIGNALS]
CELLS += [(name, "bare") for name in ("cycle", "exits", "bad_input")]     # without launch.run


class Jobs:
    """Runs the failures of the selected tests, several at once."""

    def __init__(self, cells, folder):
        self.pool = ThreadPoolExecutor(AT_ONCE)
        self.found = {cell: self.pool.submit(run, *cell, folder) for cell in cells}


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    mpi.need_mpi()
    cells = [item.callspec.params["cell"] for item in request.session.items
             if "jobs" in getattr(item, "fixturenames", ())]
    made = Jobs(cells, tmp_path_factory.mktemp("failures"))
    yield made.found
    made.pool.shutdown(cancel_futures=True)


def run(name, how, folder):
    """Run one failure -> (exit status, first screen, what it has left in its folder)"""
    argv = [sys.executable, "-m", "tests.failures", name, *(["bare"] if how == "bare" else [])]
    argv = launch.command(3, argv) if how in ("mpirun", "bare") else [*argv, "-n", "3"]
    if name == "closed_pipe":
        argv = ["bash", "-c", '"$@" | head -n 1; exit ${PIPESTATUS[0]}', "", *argv]
    folder = folder / f"{name}{how}"
    folder.mkdir()
    env = {"TMPDIR": str(folder), "MINIDIST_TIMEOUT": LIMITS.get(name, "1")}
    status, output = mpi.execute(argv, mpi.HANG, env, "waiting" if name == "interrupted" else None,
                                 getattr(signal, how, None))
    return status, output, [str(p.relative_to(folder)) for p in folder.rglob("*")]


def place(name):
    """The line that the report must point at, in a report or in a traceback."""
    lines = (mpi.ROOT / "tests/failures.py").read_text().splitlines()
    number = next(i for i, line in enumerate(lines, start=1) if line.endswith(f"# <- {name}"))
    return rf'tests/failures.py(:|", line ){number},? in '


def crashed(status, output):
    """Has Open MPI's launcher itself crashed, after it had ended the job and said so?

    Open MPI 5 does at times, where other ranks have left when one aborts."""
    return status == -signal.SIGSEGV and "prterun has exited due to process rank" in output


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_it_ends_in_time_and_says_why(cell, jobs):
    status, output, left = jobs[cell].result()
    name, how = cell
    expected, *words = SIGNALS.get(how) or (PLAIN if how == "mpirun" else ALL).get(name, ALL[name])
    assert status is not None, f"still running after {mpi.HANG} s:\n{output}"
    assert crashed(status, output) or status in (
        [expected] if isinstance(expected, int) else expected or BAD), output
    lines = [line for line in output.splitlines() if not re.match(OPEN_MPIS_STACK, line)]
    screen = "\n".join(lines[:SCREEN])
    for word in [place(w[1:]) if w.startswith("@") else w for w in words]:
        assert re.search(word, screen), f"{word!r} is not in\n{screen}"
    assert screen.count("  cause:") <= 1 and screen.count("died without a word") <= 2, screen
    assert output.count("] ValueError: boom") <= 1 and output.count("error: 6 heads") <= 1, output
    assert name not in QUIET or not re.search("minidist:|Traceback", output), output
    assert not left, left
