"""Every lesson that exists: it proves itself, its screens fit, its bugs are caught, and its
exercise is graded: a copy of the module's functions passes, an empty stub does not; what is wrong
fails in tests/test_mutants.py."""
import ast
import functools
import importlib
import inspect
import json
import re
import sys
import tempfile
from pathlib import Path

import pytest

from lessons import caught, exercises, guess, hints, kit, script, tables, zoo
from lessons.__main__ import existing
from minidist import BadInput
from minidist.ranks import launch
from tests.mpi import execute, need_mpi

NAMES = [name for name, _, _ in existing()]
MODULES = {name: importlib.import_module(f"lessons.{name}") for name in NAMES}
SCREENS = {name: module.SCREENS for name, module in MODULES.items()}
SCRIPTS = {name: script.read(screens) for name, screens in SCREENS.items()}
PICTURES = tempfile.TemporaryDirectory()
each_lesson = pytest.mark.parametrize("name", NAMES, scope="module")        # all tests of one


def run(name, ranks, *argv):
    return kit.run_on_threads(SCREENS[name], ranks, argv)


def most(name):
    """How many thread ranks it is tried on: one if one rank runs it, whatever their number."""
    return 1 if SCRIPTS[name].alone else 3


def broken(name, bug):
    """Run a lesson's proof with a bug switched on, on three ranks.  -> what was said of it

    A whole run ends with the first bug."""
    ranks, whole = most(name), bug is SCREENS[name][-1]
    result = watched(name, ranks)[0] if whole else run(name, ranks, "--break", bug.title)
    assert result["ok"], result["output"]
    [said] = result["breaks"]
    assert said["name"] == bug.title and said["by"], "NOT CAUGHT"
    return said["by"]


@functools.cache
def watched(name, ranks):
    """Run a lesson, and look at what stands above its questions.

    -> result, [(question, a number above it that is its answer, in whatever unit)]"""
    spoiled, original = [], kit.Lesson.predict

    def predict(self, question, answer, unit="", **more):
        if self.comm.rank == 0:
            above = self.out.getvalue() + question
            spoiled.extend((question, found) for found in numbers(above, unit)
                           if found and guess.near(found, answer) or found == answer)
        original(self, question, answer, unit, **more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kit.Lesson, "predict", predict)
        drawn = ["--out", PICTURES.name] if ranks == most(name) else ["--no-figure"]
        return run(name, ranks, *drawn), spoiled


@pytest.mark.parametrize("ranks", [1, 3])               # 2 under mpirun, 4 as a reader's file
@each_lesson
def test_a_lesson_proves_itself_on_thread_ranks(name, ranks):
    if ranks > most(name):
        pytest.skip("one rank runs it, whatever their number")
    result, spoiled = watched(name, ranks)
    assert result["ok"], result["output"]
    assert not spoiled, "what stands above a question gives its answer away"
    assert result["lesson"] == name and result["ranks"] == ranks
    assert result["checks"] and all(set(c) == {"name", "error", "bound", "ok"}
                                    for c in result["checks"])
    assert all(set(row) == {"quantity", "formula", "predicted", "measured", "ok"}
               for row in result["ledger"])
    check_form(name, result["output"])
    assert ranks < most(name) or Path(PICTURES.name, f"{name}.png").exists(), "no picture"


def check_form(name, output):
    """Ninety lines, in screens of 24, as wide as a terminal, in the order promised."""
    lines = output.splitlines()
    assert max(map(len, lines)) <= tables.WIDTH
    assert len(lines) <= 90, f"{len(lines)} lines"
    assert max(len(screen.splitlines()) for screen in output.split("\n-- ")) <= 24
    titles = [inspect.getdoc(screen).splitlines()[0] for screen in SCREENS[name][:-1]]
    heads = [line.strip("- ") for line in lines if line.startswith("-- ")]
    assert heads == [f"{i}  {title}" for i, title in enumerate([*titles, "Break it"], 1)] + [
        "Takeaway"]


@each_lesson
def test_a_lesson_has_the_form(name):
    """Short; a function per screen, a planted bug at the end; guesses and a takeaway."""
    module, lesson = MODULES[name], SCRIPTS[name]
    assert len(inspect.getsource(module).splitlines()) <= 220
    *screens, bug = SCREENS[name]
    assert len(screens) >= 3 and lesson.prove in screens and hasattr(bug, "replaces")
    assert all(inspect.getdoc(screen) for screen in screens)
    longest = max(len(inspect.getsource(screen).splitlines()) for screen in screens)
    assert longest <= 30, f"a screen's function has {longest} lines"      # words and code: about 25
    assert all(lesson.close) and lesson.exercise and len(lesson.breaks) >= 2
    assert inspect.getsource(module).count("lesson.predict(") in (2, 3)


def numbers(text, unit):
    """Every number in a text with what follows it, in the unit asked for."""
    found = re.findall(r"(?<![\w.])[\d,]*\.?\d+(?:e[-+]?\d+)?(?: ?[%a-zA-Z]+)?", text)
    return [guess.number(each, unit) for each in found]


@each_lesson
def test_every_bug_is_caught_by_symptoms_of_its_own(name):
    """The checks and counts that fail, or how the run ends, tell a reader which bug it is."""
    seen = {}
    for bug in SCRIPTS[name].breaks:
        by = broken(name, bug)
        recorded = caught.CAUGHT[f"{name}.{bug.title}"]
        assert zoo.classify(by, bug.sync) == recorded, "python -m lessons.zoo --rerun"
        symptoms = tuple(line.split(": difference")[0].split(": predicted")[0] for line in by)
        assert seen.setdefault(symptoms, bug.title) == bug.title, (seen, symptoms)


@each_lesson
def test_a_lesson_proves_itself_under_mpirun(name, tmp_path):
    """On two processes, and with one picture, which threads have drawn above; .ci/run starts four,
    and draws all."""
    need_mpi()
    path, drawn = tmp_path / "result.json", name == NAMES[0]
    command = [sys.executable, "-m", f"lessons.{name}", "--json", str(path), "--out", str(tmp_path)]
    status, output = execute(launch.command(2, command + ["--no-figure"] * (not drawn)))
    assert status == 0, output
    result = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert result["ok"] and result["lesson"] == name and result["ranks"] == 2
    assert bool(list(tmp_path.glob("*.png"))) is drawn


def test_lessons_have_bugs_an_exercise_and_a_header():
    for name in NAMES:
        lesson = SCRIPTS[name]
        head = "\n".join(lesson.header)
        assert lesson.title.isupper() and lesson.question.endswith("?"), name
        words = [line.split()[0] for line in lesson.header if line.strip()][1:]
        assert [w for w in words if w in ("lifts", "costs", "code", "run", "before")] == [
            "lifts", "costs", "code", "run", "before"], (name, words)
        assert "next" in head and f"python -m lessons.{name}" in head


# ---- exercises

def solution(name):
    """The reader's file, filled in from the module."""
    return exercises.stub(SCRIPTS[name], "mine.py", inspect.getsource)


@each_lesson
def test_the_module_s_own_functions_pass(name, tmp_path, monkeypatch):
    """As a reader's file; on four ranks: the module's own are proven on 1, 2 and 3 above."""
    monkeypatch.setattr(exercises, "SIZES", (4,))
    mine = tmp_path / "mine.py"
    mine.write_text(solution(name))
    result = run(name, 1, "--mine", str(mine))
    assert result["ok"], result["output"]


@each_lesson
def test_every_function_has_a_hint_that_is_no_solution(name):
    functions = {f.__name__: f for f in SCRIPTS[name].exercise}
    assert set(hints.HINTS.get(name, {})) == set(functions)
    for function, hint in hints.HINTS.get(name, {}).items():
        node = ast.parse(exercises.source(functions[function])).body[0]
        body = [" ".join(ast.unparse(line).split()) for line in node.body[1:]]
        assert len(hint) > 20 and not [line for line in body if line in hint]
        [line] = run(name, 1, "--hint", function)["output"].splitlines()[:1]
        assert line.strip().startswith(function + ": ")
    assert run(name, 1, "--hint")["output"].count(": ") >= len(functions)
    with pytest.raises(BadInput, match="has no function 'nothing' to write"):
        run(name, 1, "--hint", "nothing")


@each_lesson
def test_a_stub_names_what_it_needs_and_is_not_a_solution(name, tmp_path):
    mine = tmp_path / "mine.py"
    run(name, 1, "--stub", str(mine))
    tree = ast.parse(mine.read_text())
    assert [n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))] == [
        f.__name__ for f in SCRIPTS[name].exercise]
    result = run(name, 1, "--mine", str(mine))
    assert not result["ok"] and "is not written yet" in result["output"]
