"""The house rules that reading alone would not keep: layers, pairs, sizes, who may print."""
import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minidist"

# Imports point down this table, or to the left within a row; in row 4 no module imports another.
ROWS = [
    "traffic cost tape tensor environment link counting agree buffers report watch threads "
    "processes stream safety comm launch flags",
    "attention functional nn optim data ring tree halving double_tree hierarchical alltoall mesh",
    "algorithms layouts collectives gpt",
    "mappings placement buckets",
    "dp zero tp sp cp pp ep recompute offload precision compress",
    "step ledger trace verify checkpoint parallel progress train bench_fit "
    "bench_engine bench_collectives bench_train bench_tp bench simulate plan doctor",
]
PLACE = {name: (row, column) for row, names in enumerate(ROWS)
         for column, name in enumerate(names.split())}
STRATEGIES = ROWS[4].split()
PAIRED = STRATEGIES + ["ring", "collectives", "mesh", "checkpoint"]
PRINTS = {"train", "progress", "bench", "bench_engine", "bench_train", "bench_collectives",
          "bench_fit", "bench_tp", "doctor", "simulate", "plan", "mesh"}   # commands, or parts
MPI = {"comm", "processes"}                                       # comm, and its wire over MPI
LONGEST = {"lessons/kit.py": 400}                                 # every other file: 320 lines

MODULES = sorted(p.stem for p in PACKAGE.glob("*.py") if p.stem != "__init__")
FILES = sorted(p for f in ("minidist", "lessons", "tests") for p in (ROOT / f).glob("*.py"))
by_name = pytest.mark.parametrize("name", MODULES)
by_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path, package="minidist"):
    """Name everything that a file imports, wherever in it: {'numpy', 'minidist.comm', ...}"""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [package if node.level else "", node.module]))
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def own_imports(name):
    """Name the modules of the package that one of them imports."""
    found = imports(PACKAGE / f"{name}.py")
    return {other for other in MODULES if f"minidist.{other}" in found}


def points_down(name, other):
    (row, column), (other_row, other_column) = PLACE[name], PLACE[other]
    return other_row < row or other_row == row != 4 and other_column < column


def test_the_table_says_what_it_should():
    assert points_down("gpt", "comm") and points_down("comm", "tensor")
    assert not points_down("comm", "gpt") and not points_down("tensor", "comm")
    assert not points_down("sp", "tp") and not points_down("zero", "dp")


@by_name
def test_imports_point_down_or_left(name):
    assert name in PLACE, f"give {name} a place in ROWS"
    wrong = {other for other in own_imports(name) if not points_down(name, other)}
    assert not wrong, f"minidist.{name} may not import {', '.join(sorted(wrong))}"


@by_name
def test_only_the_communicator_knows_mpi(name):
    knows = any(i.split(".")[0] == "mpi4py" for i in imports(PACKAGE / f"{name}.py"))
    assert not knows or name in MPI
    others = {i.split(".")[0] for i in imports(PACKAGE / f"{name}.py")} & {"lessons", "tests"}
    assert not others or name.startswith("bench") and others == {"tests"}  # PyTorch's twin


@by_file
def test_nothing_else_is_needed(path):
    """numpy, mpi4py, matplotlib; pytest and, where it happens to be, torch in tests and bench."""
    allowed = {"numpy", "mpi4py", "matplotlib", "minidist", "lessons", "tests", "pydoc_data"}
    if path.parent.name == "tests" or path.stem.startswith("bench"):
        allowed |= {"pytest", "torch"}
    from sys import stdlib_module_names
    used = {i.split(".")[0] for i in imports(path)} - {"__future__", "__main__"}
    assert used <= allowed | stdlib_module_names


@pytest.mark.parametrize("name", [n for n in PAIRED if n in MODULES])
def test_module_lesson_and_test_have_one_name(name):
    lesson = ROOT / "lessons" / f"{name}.py"
    assert lesson.exists() and (ROOT / "tests" / f"test_{name}.py").exists()
    assert f"lessons.{name}" in lesson_line(name)
    assert f"minidist/{name}.py" in ast.get_docstring(tree(lesson))


def lesson_line(name):
    doc = ast.get_docstring(tree(PACKAGE / f"{name}.py")) or ""
    return "".join(re.findall(r"^Lesson: .*", doc, re.MULTILINE))


@by_name
def test_docstring_begins_with_a_sentence_and_names_a_lesson_that_exists(name):
    doc = ast.get_docstring(tree(PACKAGE / f"{name}.py"))
    assert doc and doc.split("\n\n")[0].rstrip().endswith((".", "?"))
    for lesson in re.findall(r"lessons\.(\w+)", lesson_line(name)):
        assert (ROOT / "lessons" / f"{lesson}.py").exists(), f"no lesson {lesson}"


@by_file
def test_files_are_short_and_narrow(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    wide = [f"{path.name}:{i}" for i, line in enumerate(lines, 1) if len(line) > 100]
    assert not wide, f"wider than 100 columns: {', '.join(wide)}"
    longest = LONGEST.get(str(path.relative_to(ROOT)), 320)
    if path.parent.name != "tests":
        assert len(lines) <= longest, f"{len(lines)} lines are two ideas: split the file"


@pytest.mark.parametrize("name", [n for n in MODULES if n not in PRINTS])
def test_libraries_do_not_print(name):
    """To say something on stderr, as a report of a hang must, is allowed."""
    calls = [node for node in ast.walk(tree(PACKAGE / f"{name}.py")) if isinstance(node, ast.Call)]
    said = [c.lineno for c in calls if getattr(c.func, "id", "") == "print"
            and "file" not in {k.arg for k in c.keywords}]
    assert not said, f"minidist/{name}.py prints in lines {said}"


def test_tool_settings_are_in_one_place():
    assert len((ROOT / "pyproject.toml").read_text().splitlines()) == 3
    assert [p.name for p in ROOT.glob("*.toml")] == ["pyproject.toml"]
    assert not [f for f in ("tox.ini", "pytest.ini", "setup.py") if (ROOT / f).exists()]
