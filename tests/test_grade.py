"""lessons.grade: right solutions have their points; the usual cheats have none, and a reason.

The ring's exercise stands for all in most of these: it is small and sends messages. Ranks are 1 and
2 here, and 1 to 4 in `python -m tests.grading`, which grades the functions of every lesson.
"""
import ast
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest

from lessons import exercises, grade, session
from lessons.script import existing
from minidist import BadInput
from minidist.cost import messages
from minidist.engine import functional
from tests import grading

RING = '''
"""python -m lessons.ring --mine ring.py"""
import numpy as np
from minidist.collectives.ring import cut

def reduce_scatter(chunks, comm, op=np.add):
    p, r = comm.size, comm.rank
    for s in range(p - 1):
        mine = chunks[(r - s - 2) % p]
        got = np.empty_like(mine)
        comm.sendrecv(chunks[(r - s - 1) % p], (r + 1) % p, got, (r - 1) % p)
        mine[...] = op(mine, got)

def all_gather(chunks, comm):
    p, r = comm.size, comm.rank
    for s in range(p - 1):
        comm.sendrecv(chunks[(r - s) % p], (r + 1) % p, chunks[(r - s - 1) % p], (r - 1) % p)

def all_reduce(x, comm, op=np.add):
    sizes = [len(part) for part in np.array_split(x, comm.size)]
    parts = np.split(x, np.cumsum(sizes)[:-1])
    reduce_scatter(parts, comm, op)
    all_gather(parts, comm)
'''


@pytest.fixture(autouse=True)
def few_ranks(monkeypatch):
    monkeypatch.setattr(exercises, "SIZES", (1, 2))


def paper(folder, text, name="mine.py"):
    path = folder / name
    path.write_text(text)
    return grade.Paper(str(path))


def options(**changed):
    return SimpleNamespace(**dict(json=None, seed=5, seconds=20, megabytes=2048) | changed)


def graded(folder, text, function, **changed):
    """Grade one function of a file.  -> its record"""
    sheet = paper(folder, text)
    by_name = {f.__name__: f for f in sheet.script.exercise}
    return grade.one(sheet, by_name[function], options(**changed))


def ring(**bodies):
    """The ring's file with other functions in place of some.  {name: text of all of it}"""
    text = RING
    for name, new in bodies.items():
        node = next(n for n in ast.parse(text).body if getattr(n, "name", "") == name)
        text = text.replace(ast.get_source_segment(text, node), textwrap.dedent(new).strip("\n"))
    return text


# ---- right solutions

@pytest.mark.parametrize("function", ["reduce_scatter", "all_gather", "all_reduce"])
def test_a_right_solution_has_its_points(function, tmp_path):
    record = graded(tmp_path, RING, function)
    points = 2 if function == "reduce_scatter" else 1              # the lesson's POINTS
    assert record == dict(points=points, ok=True, check="", message="")


TO_THE_LEFT = '''
def all_reduce(x, comm, op=np.add):
    """Around the ring the other way, in a helper of its own; results by a method of an object."""
    class Ring:
        def __init__(self, parts):
            self.parts = parts

        def turn(self, out, into):
            return comm.isend(out, (comm.rank - 1) % comm.size), comm.irecv(
                into, (comm.rank + 1) % comm.size)

    parts = cut(x, [x.size // comm.size + (i < x.size % comm.size) for i in range(comm.size)])
    ring, p, r = Ring(parts), comm.size, comm.rank
    for s in range(p - 1):
        into = np.empty_like(parts[(r + s + 2) % p])
        for request in ring.turn(parts[(r + s + 1) % p], into):
            request.wait()
        op(parts[(r + s + 2) % p], into, out=parts[(r + s + 2) % p])
    for s in range(p - 1):
        for request in ring.turn(parts[(r + s) % p], parts[(r + s + 1) % p]):
            request.wait()
'''


def test_however_it_is_written(tmp_path):
    record = graded(tmp_path, ring(all_reduce=TO_THE_LEFT), "all_reduce")
    assert record["ok"], record


def test_each_function_alone(tmp_path):
    """One that is wrong, or missing, costs its own points only: others call the library's."""
    text = ring(reduce_scatter="def reduce_scatter(chunks, comm, op=np.add): pass", all_gather="")
    for function, ok in ("reduce_scatter", False), ("all_gather", False), ("all_reduce", True):
        assert graded(tmp_path, text, function)["ok"] is ok


def test_what_python_and_numpy_bring(tmp_path):
    """Some of it asks for modules that nobody has: that is not the reader's doing."""
    used = "np.testing.assert_array_equal(copy.deepcopy(x), x)\n    return ring(x, comm, op)"
    text = RING.replace("def all_reduce", "import asyncio, copy, dataclasses, pickle\n\ndef ring")
    record = graded(tmp_path, f"{text}\ndef all_reduce(x, comm, op=np.add):\n    {used}\n",
                    "all_reduce")
    assert record["ok"], record


# A lesson and a function for each kind of argument: Tensors and their backward, models, optimizers,
# streams, generators, functions of the lesson's own.
KINDS = [("memory", "held", 1), ("dp", "share_rows", 2), ("pp", "act", 2),
         ("recompute", "checkpoint", 1), ("cp", "forward", 2)]


@pytest.mark.parametrize("lesson, function, ranks", KINDS)
def test_any_kind_of_argument(lesson, function, ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(exercises, "SIZES", (ranks,))
    monkeypatch.setattr(grade, "copied", lambda *_: "")
    record = graded(tmp_path, grading.solution(lesson), function)
    assert record["ok"], record


def test_a_helper_that_is_the_answer_is_neither_in_the_stub_nor_at_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(exercises, "SIZES", (1,))
    monkeypatch.setattr(grade, "copied", lambda *_: "")
    assert [f.__name__ for f in exercises.withheld(grading.read("step").exercise)] == [
        "_gelu_piece"]
    assert "_gelu_piece" not in exercises.stub(grading.read("step"), "mine.py")
    text = grading.solution("step")
    assert graded(tmp_path, text, "gelu")["ok"], "with a text of one's own it is right"
    own = inspect.getsource(functional._gelu_piece)
    record = graded(tmp_path, "from minidist.engine.functional import _gelu_piece\n"
                    + text.replace(own, ""), "gelu")
    assert record["points"] == 0 and "_gelu_piece is the exercise itself" in record["message"]


# ---- cheats: (text, function, what its record says, options)

def file(body, head="", function="all_reduce", **limits):
    """A ring file whose `function` has this body, with this before it."""
    signatures = dict(all_reduce="x, comm, op=np.add", all_gather="chunks, comm",
                      reduce_scatter="chunks, comm, op=np.add")
    new = f"def {function}({signatures[function]}):\n" + textwrap.indent(
        textwrap.dedent(body).strip("\n") or "pass", "    ")
    text = ring(**{function: new}).replace("import numpy as np\n",
                                           "import numpy as np\n" + textwrap.dedent(head), 1)
    return text, function, limits


READ = """
import itertools, os, sys
from functools import lru_cache
from minidist import cost

PATH = os.path.join(os.path.dirname(os.path.dirname(sys.argv[0])), "minidist/collectives/ring.py")

def use(text):
    own = dict(np=np, cost=cost, lru_cache=lru_cache, accumulate=itertools.accumulate)
    exec(text[text.index("def reduce_scatter"):], own)
    return own["all_reduce"]
"""


def read(how, body="use(TEXT)(x, comm, op)"):
    """A ring file that runs the library's text, which it gets like this."""
    return file(body, READ + textwrap.dedent(how))


LIBRARY = inspect.getsource(grading.ring.reduce_scatter)
HERE = os.path.abspath(grading.ring.__file__)
CHEATS = {
    "the library's function, imported": (
        *file("ring.all_reduce(x, comm, op)", "from minidist.collectives import ring\n"),
        "ring.all_reduce is the exercise itself"),
    "by importlib and getattr": (
        *file("LIBRARY(x, comm, op)", """
            import importlib
            LIBRARY = getattr(importlib.import_module("minidist.collectives.ring"), "all_" "reduce")
            """), "ring.all_reduce is the exercise itself"),
    "through another function that calls it": (
        *file("all_reduce_of(x, comm, out=x, algorithm='ring')",
              "from minidist.collectives import all_reduce as all_reduce_of\n"),
        "calls itself through the library"),
    "its source, read and run": (
        *file("TEXT", f"TEXT = open({HERE!r}).read()\n"), "reads .*ring.py"),
    "its source, by inspect": (
        *file("exec(inspect.getsource(cut))", "import inspect\n"), "TypeError"),
    "a copy": (RING + "\n" + LIBRARY, "reduce_scatter", {}, "a copy of the library's"),
    "a copy with other names": (
        RING + "\n" + LIBRARY.replace("mine", "yours").replace("step", "t").replace(
            "chunks", "c"), "reduce_scatter", {}, "a copy of the library's"),
    "kit.Lesson.check, replaced": (
        *file("", """
            from lessons import kit
            kit.Lesson.check = lambda *_, **__: True
            """), "imports lessons"),
    "a module of the lessons' name": (
        *file("", """
            import sys, types
            sys.modules["lessons.kit"] = sys.modules["lessons.tables"] = types.ModuleType("kit")
            sys.modules["lessons.kit"].difference = lambda *_: 0.0
            """), "all_reduce"),
    "NumPy's comparisons, replaced": (
        *file("x[...] = 0", """
            np.abs = np.max = lambda *_, **__: 0.0
            np.array_equal = np.allclose = lambda *_, **__: True
            """), "all_reduce"),
    "cost, replaced": (
        *file("comm.barrier()", """
            from minidist import cost
            cost.all_reduce = lambda *_: (0, 0, 0)
            """), "all_reduce"),
    "a forged counter": (
        *file("comm.counts.clear()"), "Comm has no counts"),
    "a counter that is written": (
        *file("comm.size = 1"), "Comm has no size to set"),
    "a raw wire beside the counted call": (
        *file("comm.plain.send(x, 0, 0)"), "Comm has no plain"),
    "a private attribute": (
        *file("comm._wire.send(x, 0, 0)"), "Comm has no _wire"),
    "a function's globals": (
        *file("cut.__globals__['np']"), "__globals__"),
    "the stream's thread": (
        *file("comm.stream().worker.queue"), "Stream has no worker"),
    "a name of the library that opens files": (
        *file("Path('x').touch()", "from minidist.engine.data import Path\n"), "not at hand"),
    "an array that all ranks share": (
        *file("""
              shared = _ones(4, np.dtype(float))
              shared[...] = 0
              assert _ones(4, np.dtype(float))[0] == 1, "it was written"
              raise ValueError("it was not")""",
              "from minidist.engine.functional import _ones\n"), "ValueError: it was not"),
    "os._exit(0) after a forged grade": (
        *file("", """
            import os
            open("grade.json", "w").write('{"state": "finished", "points": 3}')
            os._exit(0)
            """), r"left before it answered \(exit status 0\)"),
    "a grade written elsewhere": (
        *file("", "open('/tmp/grade.json', 'w').write('{}')\n"), "writes /tmp/grade.json"),
    "a file deleted": (
        *file("import os; os.remove('/tmp/minidist-grade-x')"), "os.remove outside its folder"),
    "the grader's memory": (
        *file("", "import os; open(f'/proc/{os.getppid()}/mem', 'rb')\n"), "reads /proc/"),
    "the grader's environment": (
        *file("", "import os; open(f'/proc/{os.getppid()}/environ')\n"), "reads /proc/"),
    "its source, by readline": (
        *read("""
            import readline
            readline.read_history_file(PATH)
            TEXT = "\\n".join(map(readline.get_history_item, range(1, 90)))
            """), "imports readline"),
    "its source, by a process that C starts": (
        *read("""
            import _posixsubprocess
            _posixsubprocess.fork_exec([b"cp", PATH.encode(), b"x"], [b"/bin/cp"], True)
            TEXT = open("x").read()
            """), "'NoneType' object is not callable"),
    "the same, imported again": (
        *read("del sys.modules['_posixsubprocess']\nimport _posixsubprocess\n"),
        "imports _posixsubprocess"),
    "its source, behind a hook that is found among all objects": (
        *read("""
            import gc
            for thing in gc.get_objects():
                if type(thing).__name__ == "Guard":
                    thing.inside.now = True
            TEXT = open(PATH).read()
            """), "uses gc.get_objects"),
    "its source, behind a hook that is replaced": (
        *read("""
            import __main__
            __main__.fence.Guard.wrong = __main__.fence.wrong = lambda *_: None
            TEXT = open(PATH).read()
            """), "no attribute 'fence'"),
    "a hook that is found from below": (
        *read("""
            frame = sys._getframe()
            while frame:
                if "fence" in frame.f_globals:
                    frame.f_globals["fence"].wrong = lambda *_: None
                frame = frame.f_back
            TEXT = open(PATH).read()
            """), "reads .*ring.py"),
    "a database written elsewhere": (
        *file("", "import sqlite3; sqlite3.connect('/tmp/x').execute('create table t(a)')\n"),
        "imports sqlite3"),
    "the grader, killed": (
        *file("import os; os.kill(os.getppid(), 9)"), "uses os.kill"),
    "another process": (
        *file("import subprocess; subprocess.run(['true'])"), "uses subprocess.Popen"),
    "a fork": (*file("import os; os.fork()"), "uses os.fork"),
    "a socket": (*file("import socket; socket.socket()"), "uses socket"),
    "C functions": (*file("import ctypes; ctypes.CDLL(None)"), "uses ctypes|imports ctypes"),
    "PyTorch": (*file("", "import torch\n"), "imports torch"),
    "an exit handler": (
        *file("", """
            import atexit
            atexit.register(print, '{"points": 3}')
            raise SystemExit(0)
            """), "SystemExit"),
    "records printed": (
        *file("", """
            print('ring.all_reduce   1 of 1  ok', flush=True)
            """), "all_reduce"),
    "bytes into the pipe": (
        *file("import os; os.write(int(sys.argv[1]), b'x' * 4096)", "import sys\n"),
        "broke the protocol"),
    "an answer of its own making": (
        *file("", """
            import sys
            frame = sys._getframe()
            while "self" not in frame.f_locals:
                frame = frame.f_back
            frame.f_locals["self"].say("finished", 3)
            """), "broke the protocol: 'finished'"),
    "an object that equals everything": (
        *file("""
              class Same:
                  __eq__ = __le__ = lambda *_: True
              return Same()"""), "a Same cannot leave"),
    "an array of objects": (
        *file("x.base is None; return np.array([object()])"), "no array of numbers"),
    "results of an earlier seed": (
        *file("""
              from base64 import b64encode
              kept = {16: [3.0] * 2}                        # what a run of the proof had shown
              x[...] = kept.get(x.nbytes, [0.0] * x.size)
              """), "all_reduce"),
    "twice the traffic where nobody counts": (
        *file("""
              global calls
              calls += (large := chunks[0].size == 200)
              for again in range(5 if large and calls % 2 else 1):    # the second one is counted
                  for s in range(comm.size - 1):
                      comm.shift(chunks[comm.rank - s], into=chunks[comm.rank - s - 1])
              """, "calls = 0\n", "all_gather"), "more than what is counted"),
    "no end": (*file("while True: pass", seconds=1), "computed for more than 1 s"),
    "all memory": (*file("np.ones(1 << 28)", megabytes=1024), "MemoryError|allocate"),
    "a large file": (
        *file("open('x', 'wb').write(bytes(1 << 24))"), "File too large"),
    "a deadlock": (
        *file("comm.recv(x, comm.rank)"), "mine.py:.* in all_reduce"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_has_no_points_and_a_reason(name, tmp_path, monkeypatch):
    text, function, limits, reason = CHEATS[name]
    record = graded(tmp_path, text, function, **limits)
    assert record["points"] == 0 and not record["ok"], record
    assert re.search(reason, record["message"]), record["message"]
    assert [p.name for p in tmp_path.iterdir()] == ["mine.py"]


def commit(folder, body):
    """Grade a commit of lessons.checkpoint with this body."""
    text = ('"""python -m lessons.checkpoint --mine mine.py"""\n'
            "import os, shutil\nfrom minidist.storage import FORMAT, INDEX, LATEST, write_json\n\n"
            f"def commit(target, index):\n    {body}\n")
    return graded(folder, text, "commit")


@pytest.mark.parametrize("body, reason", [
    ("(target / '../../x').write_text('')", "outside of the folder"),
    ("write_json('grade.json', {})", "must be made from the given one"),
    ("os.rename(target, '/tmp/x')", "needs paths made from the given one"),
    ("open('/tmp/x', 'w')", "writes /tmp/x")])
def test_a_path_reaches_its_own_folder_only(body, reason, tmp_path):
    record = commit(tmp_path, body)
    assert record["points"] == 0 and reason in record["message"], record


def test_what_is_done_to_a_path_is_seen_by_the_lesson(tmp_path):
    """A commit in the wrong order is killed where the lesson chooses, by the grader's own os."""
    record = commit(tmp_path, "part = target.with_name(target.name + '.part'); "
                    "target.exists() and shutil.rmtree(target); os.rename(part, target); "
                    "write_json(target / INDEX, {'format': FORMAT, **index}); "
                    "write_json(target.parent / LATEST, {'checkpoint': target.name})")
    assert record["check"] == "killed at any moment: the old or the new one loads", record


def test_a_table_of_the_library_stays_as_it_is(tmp_path):
    text = file("TERMS.clear()", "from minidist.cost.messages import TERMS\n")[0]
    before = dict(messages.TERMS)
    assert not graded(tmp_path, text, "all_reduce")["ok"]
    assert messages.TERMS == before != {}


def test_a_batch_that_is_emptied(tmp_path):
    """With no targets left every training is equal: the reference sees the same batch."""
    text = grading.solution("dp").replace(
        "return batch if", "batch.targets.setflags(write=True); batch.targets[...] = -100\n"
        "        return batch if")
    assert "setflags" in text
    record = graded(tmp_path, text, "share_rows")
    assert record["points"] == 0 and "read-only here" in record["message"], record


def test_who_does_not_answer_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "WALL", 1)
    text = file("import time; comm.barrier(); time.sleep(600)")[0]
    record = graded(tmp_path, text, "all_reduce", seconds=2)
    assert "no answer within 2 s" in record["message"] and "in all_reduce" in record["message"]


def test_the_environment_reaches_no_process(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit(0)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "sitecustomize.py"))
    text = file("", "import os\nassert not [k for k in os.environ if 'PYTHON' in k]\n")[0]
    assert graded(tmp_path, text, "reduce_scatter")["ok"]


# ---- what it says

def test_what_is_wrong_has_a_place(tmp_path):
    empty = 'raise NotImplementedError'
    assert graded(tmp_path, file(empty)[0], "all_reduce")["message"] == (
        "1 rank: mine.py, line 20, in all_reduce: not written yet")
    assert "mine.py, line 20, in all_reduce: ZeroDivisionError" in graded(
        tmp_path, file("1 / 0")[0], "all_reduce")["message"]
    assert "mine.py, line 4: SyntaxError: '(' was never closed" in graded(
        tmp_path, RING.replace("import cut", "import (cut"), "all_reduce")["message"]
    record = graded(tmp_path, file("")[0], "all_reduce")
    assert record["check"] == "all_reduce, asked alone"


def test_a_seed_decides_the_values(tmp_path):
    sheet = paper(tmp_path, file("raise ValueError(str(x[:3]))")[0])
    function = sheet.script.exercise[2]
    said = [grade.one(sheet, function, options(seed=seed))["message"] for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


# ---- the command

def command(*argv, **more):
    return subprocess.run([sys.executable, "-m", "lessons.grade", *map(str, argv)], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)


WALLS = '''
"""python -m lessons.walls --mine walls.py"""
def at_least(work, peak, bandwidth):
    times = [work.flops / peak, work.bytes / bandwidth]
    return sorted(times)[1]
'''


def test_the_command_grades_and_writes_records(tmp_path):
    mine, out = tmp_path / "walls.py", tmp_path / "grade.json"
    mine.write_text(WALLS)
    out.write_text('{"state": "finished", "points": 99}')
    done = command(mine, "--json", out, "--seed", 3)
    assert done.returncode == 0 and "1 of 3 points, seed 3" in done.stdout, done.stdout
    data = json.loads(out.read_text())
    assert (data["state"], data["seed"], data["points"], data["possible"]) == ("finished", 3, 1, 3)
    assert [(r["lesson"], r["function"], r["points"], r["possible"], r["ok"])
            for r in data["records"]] == [
        ("walls", "linear_work", 0, 1, False), ("walls", "attention_work", 0, 1, False),
        ("walls", "at_least", 1, 1, True)]
    assert "attention_work is not defined" in data["records"][1]["message"]


def until(done):
    while not done():
        time.sleep(0.05)


def processes():
    """All that run, the ended ones apart.  -> [(number, its parent's number)]"""
    lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], text=True, check=True,
                           stdout=subprocess.PIPE).stdout.splitlines()
    return [(int(own), int(parent)) for own, parent, state in map(str.split, lines)
            if not state.startswith("Z")]


@pytest.mark.parametrize("number, state", [
    (signal.SIGINT, "interrupted"), (signal.SIGTERM, "interrupted"),
    (signal.SIGKILL, "did not finish")])
@pytest.mark.parametrize("later", [False, True])
def test_a_grade_that_is_interrupted_says_so(number, state, later, tmp_path):
    """At once, or when the reader's process runs: that ends too, though it computes for ever."""
    mine, out = tmp_path / "walls.py", tmp_path / "grade.json"
    mine.write_text(WALLS + "\nwhile True: pass\n")
    with subprocess.Popen([sys.executable, "-m", "lessons.grade", str(mine), "--json", str(out)],
                          stdout=subprocess.DEVNULL) as running:
        until(out.exists)
        until(lambda: not later or running.pid in dict(processes()).values())
        assert json.loads(out.read_text())["state"] == "did not finish"
        started = [own for own, parent in processes() if parent == running.pid]
        running.send_signal(number)
        running.wait()
    data = json.loads(out.read_text())
    assert running.returncode and data["state"] == state and data["points"] == 0
    until(lambda: not {own for own, _ in processes()} & {*started})


def test_what_cannot_be_graded_is_one_sentence(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("def f(): pass")
    done = command(mine)
    assert done.returncode == 2 and "names no lesson" in done.stdout
    assert "Traceback" not in done.stdout and len(done.stdout.splitlines()) == 1


def refusal(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["grade", *map(str, argv)])
    with pytest.raises(BadInput) as refused:
        grade.main()
    return str(refused.value)


def test_what_else_is_refused(tmp_path, monkeypatch):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(WALLS)
    files = tmp_path / "a.py", tmp_path / "b.py"
    assert "two files are for lessons.walls" in refusal(monkeypatch, *files)
    assert "cannot read" in refusal(monkeypatch, tmp_path / "none.py")
    assert "without loss of" in refusal(monkeypatch, files[0], "--json", files[0])
    assert "is a directory" in refusal(monkeypatch, files[0], "--json", tmp_path)


def test_a_file_may_be_given_a_lesson(tmp_path):
    mine = tmp_path / "a.py"
    mine.write_text(WALLS)
    assert grade.Paper(f"ring={mine}").script.name == "ring"


def test_points_name_functions_of_the_exercise():
    for name, _, _ in existing():
        plan = grading.read(name)
        assert set(plan.points) <= {f.__name__ for f in plan.exercise}, name
