"""The report of a hang: its table, who may speak, and the cause it names."""
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from minidist.ranks import report, watch


def row(rank, kind="", **fields):
    """A row of one group of four ranks."""
    return report.Row(rank, pid=os.getpid(), beat=time.monotonic(), kind=kind, group="world",
                      members=(0, 1, 2, 3), line=f"lesson.py:{rank}", **fields)


class Group:
    """As much of a Comm as a report reads."""
    name, ranks = "world", (0, 1)

    def current(self):
        return "all_reduce", 7, None


# -- the cause ----------------------------------------------------------------------------------

CAUSES = {
    "a rank has left": (
        [row(0, "recv", source=1), row(1, end="has left"), row(2, "recv", source=0)],
        "rank 0 waits for rank 1, which has left"),
    "somebody computes": (
        [row(0, "recv", source=1), row(1), row(2, "recv", source=0)],
        "rank 0 waits for rank 1, which computes at lesson.py:1"),
    "receives in a cycle": (
        [row(r, "recv", source=(r + 1) % 3) for r in range(3)],
        "a cycle of receives (rank 0 -> rank 1 -> rank 2 -> rank 0): each waits for the next, "
        "and nobody sends"),
    "a rank waits for itself": (
        [row(0, "recv", source=0)], "a cycle of receives (rank 0 -> rank 0): each waits for the "
        "next, and nobody sends"),
    "sends in a cycle": (
        [row(0, "send", to=1), row(1, "send", to=0)],
        "all send first, in a cycle (rank 0 -> rank 1 -> rank 0), and nobody receives. This hangs "
        "only for large messages, since MPI buffers small ones: use sendrecv or shift"),
    "different collectives": (
        [row(0, "recv", source=1, op="all_reduce", number=3),
         row(1, "recv", source=0, op="broadcast", number=3)],
        "rank 0 is in recv in all_reduce #3, 0 bytes, group world (lesson.py:0), but rank 1 is in "
        "recv in broadcast #3, 0 bytes, group world (lesson.py:1): all ranks of a group must make "
        "the same calls in the same order"),
    "one collective behind": (
        [row(0, "recv", source=1, op="all_reduce", number=4),
         row(1, "recv", source=0, op="all_reduce", number=3)],
        "rank 0 is in recv in all_reduce #4, 0 bytes, group world (lesson.py:0), but rank 1 is in "
        "recv in all_reduce #3, 0 bytes, group world (lesson.py:1): all ranks of a group must make "
        "the same calls in the same order"),
    "ahead of one who waits for another": (        # no mismatch: rank 1 has only not come there yet
        [row(0, "recv", source=1, op="broadcast", number=4),
         row(1, "recv", source=2, op="all_reduce", number=3), row(2)],
        "rank 1 waits for rank 2, which computes at lesson.py:2"),
    "not everyone forms the group": (
        [row(0, "split"), row(1, "split"), row(2, end="has left"), row(3, "split")],
        "rank 0 waits for rank 2, which has left"),
    "one forms the group, another does not": (
        [row(0, "split"), row(1, "split"), row(2, "recv", source=0), row(3, "split")],
        "rank 0 is in split, group world (lesson.py:0), but rank 2 is in recv, 0 bytes, group "
        "world (lesson.py:2): all ranks of a group must make the same calls in the same order"),
    "everyone computes": ([row(0), row(1)], ""),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_named(name):
    rows, told = CAUSES[name]
    for r in rows:
        r.beat = time.monotonic()                  # written just now, not when this file was read
    assert report.cause(rows) == told
    assert report.explain("headline", rows).startswith("headline\n  rank 0 ")


def test_a_stream_is_waited_for_by_its_own_rank():
    rows = [row(0, "work"), row(0, "recv", thread="stream", source=1), row(1),
            row(1, thread="stream", idle=True)]
    assert report.cause(rows) == "rank 0 waits for rank 1, which has nothing to do there"
    text = report.explain("", rows)
    assert "rank 0 waits for its background stream" in text and "rank 1 (stream)" not in text


def test_a_rank_that_writes_no_more_is_shown_as_silent():
    silent = row(1)
    silent.beat -= 100
    rows = [row(0, "recv", source=1), silent]
    text = report.explain("", rows)
    assert "cause: rank 0 waits for rank 1, which has given no sign of life for 100 s" in text
    assert "rank 1 computes  at lesson.py:1  [no sign of life for 100 s]" in text


# -- the table ----------------------------------------------------------------------------------

@pytest.fixture
def table():
    path = watch.create(3)
    yield watch.Table(path)
    os.unlink(path)


def test_a_row_is_read_as_it_was_written(table):
    assert table.read() == []
    for age in range(5):                           # both halves, and over again
        table.write(1, [row(1, "recv", source=2, age=age, detail="x" * 100)])
        assert [(r.rank, r.age, r.source) for r in table.read()] == [(1, age, 2)]
    table.write(0, [row(0), row(0, thread="stream")])
    assert [(r.rank, r.thread) for r in table.read()] == [(0, "main"), (0, "stream"), (1, "main")]


def test_a_half_that_is_being_written_hides_the_other_from_nobody(table):
    table.write(1, [row(1, age=1)])
    table.write(1, [row(1, age=2)])
    newest = table.starts(1)[table.turn]
    table.map[newest:newest + 50] = b"[" * 50      # the writer was stopped in the middle
    assert [r.age for r in table.read()] == [1]


def test_details_of_any_kind_can_be_written(table):
    table.write(0, [row(0, detail=float)])
    assert table.read()[0].detail == "<class 'float'>"
    start = table.starts(0)[table.turn]
    assert json.loads(table.map[start:start + table.half])


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_longest_rows_fit(size):
    """Both threads of the last rank, with every text too long and as wide as JSON makes it."""
    path = watch.create(size)
    try:
        table, wide = watch.Table(path), "\U0001f409" * 1000
        comm = type("Group", (Group,), {"name": wide, "ranks": range(size),
                                        "current": lambda self: (wide, 10**9, wide)})()
        rows = []
        for name in "main", "stream":
            status = report.Status(threading.get_ident(), name)
            status.now, status.origin, status.end = (comm, "exchange", 0, 0, 10**12), wide, wide
            rows.append(report.row(size - 1, status, age=1e6))
        table.write(size - 1, rows)
        assert [(r.thread, len(r.members), len(r.line)) for r in table.read()] == [
            ("main", size, report.LONGEST), ("stream", size, report.LONGEST)]
    finally:
        os.unlink(path)


def test_one_of_many_processes_may_speak(table):
    path = table.file.name
    code = f"from minidist.ranks import watch; print(int(watch.Table({path!r}).claim()))"
    others = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
              for _ in range(4)]
    assert sorted(other.communicate()[0].strip() for other in others) == ["0", "0", "0", "1"]
    assert table.claimed() and not table.claim()


def test_a_dead_process_is_told_from_a_living_one(table):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 600
    while watch.alive(dead.pid) and time.monotonic() < deadline:      # a zombie counts as dead
        time.sleep(0.01)
    assert not watch.alive(dead.pid) and watch.alive(os.getpid())
    gone = row(1)
    gone.pid = dead.pid
    table.write(0, [row(0, "recv", source=1)])
    table.write(1, [gone])
    assert "cause: rank 0 waits for rank 1, which died without a word" in table.story("headline")
    assert "rank 2: not on this machine" in table.story("headline")
    dead.wait()


# -- the watchdog -------------------------------------------------------------------------------

def watchdog(table, monkeypatch, timeout):
    """A watchdog of rank 0 that never wakes by itself, and the list of its aborts."""
    monkeypatch.setenv("MINIDIST_TIMEOUT", str(timeout))
    monkeypatch.setattr(watch.Watchdog, "run", lambda self: None)
    status, aborted = report.Status(threading.get_ident()), []
    return watch.Watchdog(table, 0, [status], aborted.append), status, aborted


def test_the_age_of_a_wait_is_that_of_one_message(table, monkeypatch):
    dog, status, _ = watchdog(table, monkeypatch, 60)
    monkeypatch.setattr(watch.time, "monotonic", iter(range(100, 200)).__next__)
    group = Group()
    status.now = group, "recv", None, 1, 80
    ages = [dog.age(status) for _ in range(3)]
    status.now = group, "recv", None, 1, len("x" * 80)         # the next message, just like it
    assert ages == [0, 1, 2] and dog.age(status) == 0
    status.now = None
    assert dog.age(status) == 0


def test_the_row_says_what_the_thread_waits_in(table, monkeypatch):
    dog, status, _ = watchdog(table, monkeypatch, 60)
    status.now = Group(), "recv", None, 1, 80
    dog.write()
    seen = table.read()[0]
    assert (seen.kind, seen.source, seen.to) == ("recv", 1, None)
    assert (seen.op, seen.number) == ("all_reduce", 7)
    assert seen.line.startswith("tests/test_watch.py:")
    assert seen.line.endswith("in test_the_row_says_what_the_thread_waits_in")


def test_the_watchdog_barks_once_and_ends_the_job(table, monkeypatch, capfd):
    dog, status, aborted = watchdog(table, monkeypatch, 0.01)
    status.now = Group(), "recv", None, 1, 80
    dog.write()
    assert table.claim()
    dog.bark("longer than MINIDIST_TIMEOUT=0.01")
    told = capfd.readouterr().err
    assert aborted == [watch.TIMED_OUT] and told.count("longer than MINIDIST_TIMEOUT=0.01") == 1
    assert "for a message from rank 1  recv in all_reduce #7, 80 bytes, group world" in told
