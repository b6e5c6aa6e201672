"""The house rules that reading alone would not keep: layers, pairs, sizes, who may print."""
import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minidist"

# What each group of modules may import, besides itself.  Within a group imports form no circle; one
# technique never imports another.
ROOMS = {"cost": set(), "engine": set(), "ranks": set(), "collectives": {"cost", "ranks"},
         "meeting": {"cost", "engine", "ranks", "collectives"}}
ROOMS["technique"] = ROOMS["meeting"] | {"meeting"}
ROOMS["whole"] = ROOMS["technique"] | {"technique"}
ROOMS["command"] = ROOMS["bench"] = ROOMS["whole"] | {"whole"}
TOP = {"meeting": "mesh mappings placement buckets schedules",
       "technique": "dp zero tp sp pp flash cp ulysses moe ep recompute offload precision compress",
       "whole": "step parallel verify ledger trace checkpoint progress flags",
       "command": "train sample plan simulate doctor"}
FOLDERS = ["engine", "ranks", "collectives", "cost", "bench"]
PAIRED = [*TOP["technique"].split(), "collectives.ring", "collectives", "mesh", "schedules",
          "checkpoint", "plan"]
PRINTS = {"train", "sample", "progress", "doctor", "simulate", "plan", "mesh"}   # and all of bench
COMMANDS = {"mesh": {"flags"}}       # what a module's main() imports so that it can be a command
MPI = {"ranks.processes"}
LINES = 320                                                      # of a file, at most
LONGEST = {"lessons/kit.py": 400}                                # the exceptions


def dotted(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = sorted(dotted(p) for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")
FILES = sorted(p for f in ("minidist", "lessons", "tests") for p in (ROOT / f).rglob("*.py"))
by_name = pytest.mark.parametrize("name", MODULES)
by_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))


def file(name):
    path = PACKAGE.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def group(name):
    """The room that a module is in, or the group that names it."""
    room = name.split(".")[0]
    return room if room in FOLDERS else next(
        (kind for kind, names in TOP.items() if name in names.split()), None)


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path):
    """Name everything that a file imports, wherever in it: {'numpy', 'minidist.ranks.comm', ...}"""
    package = "minidist." + ".".join(path.relative_to(PACKAGE).parts[:-1]) if (
        PACKAGE in path.parents) else ""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [package.strip(".") if node.level else "", node.module]))
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def own_imports(name):
    """Name the modules of the package that one of them imports."""
    found = {i.removeprefix("minidist.") for i in imports(file(name))}
    return {other for other in MODULES if other in found} - {name}


def may_import(name, other):
    a, b = group(name), group(other)
    if a == b:
        return a != "technique"
    return b in ROOMS[a]


def test_the_table_says_what_it_should():
    assert may_import("engine.gpt", "engine.tensor") and may_import("mappings", "engine.tensor")
    assert not may_import("ranks.comm", "engine.tensor")
    assert not may_import("engine.nn", "ranks.comm")
    assert not may_import("sp", "tp") and not may_import("zero", "dp")
    assert not may_import("cost.model", "engine.gpt") and not may_import("mesh", "flags")


@by_name
def test_imports_stay_within_the_rules(name):
    assert group(name), f"give {name} a place in TOP"
    wrong = {other for other in own_imports(name) if not may_import(name, other)}
    wrong -= COMMANDS.get(name, set())
    assert not wrong, f"minidist.{name} may not import {', '.join(sorted(wrong))}"


def test_there_is_no_circle():
    """A folder's face hands on names of its modules: who imports the face imports those."""
    edges = {name: {o for o in own_imports(name) if o not in FOLDERS} for name in MODULES}
    edges = {name: found - COMMANDS.get(name, set()) for name, found in edges.items()}

    def walk(name, path):
        assert name not in path, "a circle: " + " -> ".join([*path[path.index(name):], name])
        if name not in done:
            for other in sorted(edges[name]):
                walk(other, [*path, name])
            done.add(name)

    done = set()
    for name in MODULES:
        walk(name, [])


@by_name
def test_only_the_wire_over_processes_knows_mpi(name):
    knows = any(i.split(".")[0] == "mpi4py" for i in imports(file(name)))
    assert not knows or name in MPI or group(name) == "bench"
    others = {i.split(".")[0] for i in imports(file(name))} & {"lessons", "tests"}
    assert not others or group(name) == "bench" and others == {"tests"}   # PyTorch's twin


def test_the_map_shows_the_folders():
    """`ls minidist` is five folders and the names of the groups; the docstring lists them."""
    top = {p.stem for p in PACKAGE.glob("*.py")} - {"__init__"}
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders == set(FOLDERS)
    assert not [p for p in PACKAGE.glob("*/*") if p.is_dir() and p.name != "__pycache__"]
    doc = ast.get_docstring(tree(PACKAGE / "__init__.py"))
    shown = set(re.findall(r"[a-z_]+", doc[doc.index("\n    "):]))
    inside = {n.split(".")[1] for n in MODULES if "." in n} - {"__main__"}
    missing = (top | folders | inside) - shown
    assert not missing, f"the map in minidist/__init__.py lacks {', '.join(sorted(missing))}"


@by_file
def test_nothing_else_is_needed(path):
    """numpy, mpi4py, matplotlib; pytest and, where it happens to be, torch in tests and bench."""
    allowed = {"numpy", "mpi4py", "matplotlib", "minidist", "lessons", "tests"}
    if path.parent.name in ("tests", "bench"):
        allowed |= {"pytest", "torch"}
    from sys import stdlib_module_names
    used = {i.split(".")[0] for i in imports(path)} - {"__future__", "__main__"}
    assert used <= allowed | stdlib_module_names


@pytest.mark.parametrize("name", [n for n in PAIRED if n in MODULES])
def test_module_lesson_and_test_have_one_name(name):
    last = name.split(".")[-1]
    lesson = ROOT / "lessons" / f"{last}.py"
    assert lesson.exists() and (ROOT / "tests" / f"test_{last}.py").exists()
    assert f"lessons.{last}" in lesson_line(name)
    assert f"minidist/{name.replace('.', '/')}" in ast.get_docstring(tree(lesson))


def lesson_line(name):
    doc = ast.get_docstring(tree(file(name))) or ""
    return "".join(re.findall(r"^Lesson: .*", doc, re.MULTILINE))


@by_name
def test_docstring_begins_with_a_sentence_and_names_a_lesson_that_exists(name):
    doc = ast.get_docstring(tree(file(name)))
    assert doc and doc.split("\n\n")[0].rstrip().endswith((".", "?"))
    for lesson in re.findall(r"lessons\.(\w+)", lesson_line(name)):
        assert (ROOT / "lessons" / f"{lesson}.py").exists(), f"no lesson {lesson}"


@by_file
def test_files_are_short_and_narrow(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    wide = [f"{path.name}:{i}" for i, line in enumerate(lines, 1) if len(line) > 100]
    assert not wide, f"wider than 100 columns: {', '.join(wide)}"
    longest = LONGEST.get(str(path.relative_to(ROOT)), LINES)
    if path.parent.name != "tests":
        assert len(lines) <= longest, f"{len(lines)} lines are two ideas: split the file"


@pytest.mark.parametrize("name", [n for n in MODULES if n not in PRINTS and group(n) != "bench"])
def test_libraries_do_not_print(name):
    """To say something on stderr, as a report of a hang must, is allowed."""
    calls = [node for node in ast.walk(tree(file(name))) if isinstance(node, ast.Call)]
    said = [c.lineno for c in calls if getattr(c.func, "id", "") == "print"
            and "file" not in {k.arg for k in c.keywords}]
    assert not said, f"minidist/{name}.py prints in lines {said}"


def test_tool_settings_are_in_one_place():
    assert len((ROOT / "pyproject.toml").read_text().splitlines()) == 3
    assert [p.name for p in ROOT.glob("*.toml")] == ["pyproject.toml"]
    assert not [f for f in ("tox.ini", "pytest.ini", "setup.py") if (ROOT / f).exists()]
