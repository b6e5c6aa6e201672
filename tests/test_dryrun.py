"""dryrun: ranks take the actions of the lists, in order, and never before their input is there.

How long it took is not asserted: a busy machine sleeps longer. `python -m minidist.dryrun` says it.
"""
import json
import sys

import pytest

from minidist import dryrun, schedules
from tests.mpi import execute

TIMES = 1, 2, 1
MS = 2


@pytest.mark.parametrize("name", schedules.ORDERS)
def test_a_run_keeps_to_its_schedule(name):
    s = schedules.make(name, 3, 4)
    t = dryrun.run(s, *TIMES, unit=MS / 1e3)
    assert [[action for action, _, _ in mine] for mine in t.spans] == [list(a) for a in s.actions]
    ends = {(schedules.passed(kind), i, s.stage(rank, chunk)): end
            for rank, mine in enumerate(t.spans) for (kind, i, chunk), _, end in mine
            if kind != "W"}
    for rank, mine in enumerate(t.spans):
        assert all(before[2] <= after[1] for before, after in zip(mine, mine[1:]))
        for action, start, end in mine:
            source, _ = s.neighbours(rank, action)
            assert source is None or ends[schedules.passed(action[0]), action[1], source] <= start
            # Each kind of work sleeps at least as long as it should: B as long as I and W.
            least = {"F": 1, "I": 2, "W": 1, "B": 3}[action[0]] / s.v
            assert end - start > 0.99 * least


def test_a_message_takes_its_time():
    t = dryrun.run(schedules.make("1f1b", 2, 1), message=3, unit=MS / 1e3)
    (_, _, there), (_, back, _) = t.spans[0]
    assert back - there > 0.99 * (3 + 3 + 3)                # there, F and B on rank 1, back


def test_the_command_lays_plan_and_run_side_by_side(tmp_path):
    def run(*args):
        return execute([sys.executable, "-m", "minidist.dryrun", "-p", "2", "-m", "3", *args])

    made = {flag: tmp_path / f"{flag}.json" for flag in ("trace", "json")}
    status, output = run("--ms", "2", "--schedule", "1f1b,interleaved", *(
        word for flag, path in made.items() for word in (f"--{flag}", str(path))))
    assert status == 0 and output.count("rank 1") == 4 and "run / plan" in output
    events = json.loads(made["trace"].read_text())["traceEvents"]
    boxes = [e for e in events if e["ph"] == "X"]
    lanes = {(e["pid"], e["args"]["name"]): e["tid"] for e in events if e["name"] == "thread_name"}
    for rank in (0, 1):
        plan, real = ([e["name"] for e in boxes if e["tid"] == lanes[rank, f"interleaved {lane}"]]
                      for lane in ("plan", "run"))
        assert plan == real and len(plan) == 2 * 2 * 3 and plan[0] == "F0a"
    data = json.loads(made["json"].read_text())
    assert [row["schedule"] for row in data["run"]] == ["1f1b", "interleaved"]
    assert data["plan"][0]["work"] == 9 <= data["run"][0]["work"]
    status, output = run("--ms", "0.5")
    assert status == 2 and "--ms" in output and "Traceback" not in output
