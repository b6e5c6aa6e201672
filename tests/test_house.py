"""The house rules that reading alone would not keep: layers, pairs, sizes, who may print."""
import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from lessons.__main__ import ORDER, existing

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minidist"

# What each group of modules may import, besides itself.  Within a group imports form no circle; one
# technique never imports another.
ROOMS = {"cost": set(), "engine": set(), "ranks": set(), "collectives": {"cost", "ranks"},
         "meeting": {"cost", "engine", "ranks", "collectives"}}
ROOMS["technique"] = ROOMS["meeting"] | {"meeting"}
ROOMS["whole"] = ROOMS["technique"] | {"technique"}
ROOMS["command"] = ROOMS["whole"] | {"whole"}
ROOMS["bench"] = ROOMS["command"] | {"command"}
TOP = {"meeting": "mesh mappings placement buckets schedules",
       "technique": "dp zero tp sp pp flash cp ulysses moe ep recompute offload precision compress",
       "whole": "step parallel verify ledger trace checkpoint storage progress flags files "
                "models resume replicas pairs estimate machine published search "
                "request",
       "command": "train sample plan simulate dryrun doctor fuzz sweep recorder "
                  "calibrate trial"}
FOLDERS = ["engine", "ranks", "collectives", "cost", "bench"]
PAIRED = [*TOP["technique"].split(), "collectives.ring", "collectives", "mesh", "schedules",
          "checkpoint", "plan"]
LESSONS_TO_COME = set()
PRINTS = {"train", "sample", "progress", "files", "fuzz", "sweep", "doctor", "simulate", "dryrun",
          "plan", "mesh", "calibrate"}                                   #  and all of bench
BUILDS_ON = {"zero": {"dp"},           # ZeRO is data parallelism, held once
             "cp": {"flash", "ulysses"},     # a ring passes tiles around; ulysses is a method of cp
             "ep": {"moe"}}         # the experts of a mixture, shared out
COMMANDS = {"mesh": {"flags"}, "verify": {"sweep"}}    # imported by main(), to be a command
MPI = {"ranks.processes"}
LINES = 320                                                      # of a file, at most


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
        return a != "technique" or other in BUILDS_ON.get(name, ())
    return b in ROOMS[a]


def test_the_table_says_what_it_should():
    assert may_import("engine.gpt", "engine.tensor") and may_import("mappings", "engine.tensor")
    assert not may_import("ranks.comm", "engine.tensor")
    assert not may_import("engine.nn", "ranks.comm")
    assert not may_import("sp", "tp") and not may_import("zero", "tp")
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


@pytest.mark.parametrize("name", [n for n in PAIRED if n in MODULES and n not in LESSONS_TO_COME])
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
        exists = (ROOT / "lessons" / f"{lesson}.py").exists() or lesson in LESSONS_TO_COME
        assert exists, f"no lesson {lesson}"


@by_file
def test_files_are_short_and_narrow(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    wide = [f"{path.name}:{i}" for i, line in enumerate(lines, 1) if len(line) > 100]
    assert not wide, f"wider than 100 columns: {', '.join(wide)}"
    if path.parent.name != "tests":
        assert len(lines) <= LINES, f"{len(lines)} lines are two ideas: split the file"


@pytest.mark.parametrize("name", [n for n in MODULES if n not in PRINTS and group(n) != "bench"])
def test_libraries_do_not_print(name):
    """To say something on stderr, as a report of a hang must, is allowed."""
    calls = [node for node in ast.walk(tree(file(name))) if isinstance(node, ast.Call)]
    said = [c.lineno for c in calls if getattr(c.func, "id", "") == "print"
            and "file" not in {k.arg for k in c.keywords}]
    assert not said, f"minidist/{name}.py prints in lines {said}"


# ---- names that prose gives, the order in which one reads, functions that are long

LONG = {"minidist/engine/attention.py scaled_dot_product_attention": "forward and vjp side by side",
        "minidist/ranks/comm.py sendrecv": "the hot path: counts and events without calls",
        "minidist/ranks/comm.py exchange": "the hot path: counts and events without calls",
        "minidist/train.py parser": "a table of flags"}


def defined(path):
    """Name what a module defines or hands on, and the attributes of its classes."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def exists(dotted_name):
    """Is there a module, or a name in a module, that prose may mean by this?

    What the layout or the reading order names may still be to come."""
    room, *names = dotted_name.split(".")
    if room == "lessons":
        module = ROOT / "lessons" / f"{names[0]}.py"
        return names[0] in ORDER or module.exists() and set(names[1:2]) <= defined(module)
    if room == "minidist":
        if names[0] in " ".join(TOP.values()).split() and names[0] not in MODULES:
            return True
        split = max((i for i in (1, 2) if ".".join(names[:i]) in MODULES), default=0)
        return split > 0 and set(names[split:split + 1]) <= defined(file(".".join(names[:split])))
    homes = [name for name in MODULES if name.split(".")[-1] == room]       # cost.tp, comm.size
    near = {other for home in homes for other in MODULES                    # a base class is near
            if other == home or "." in home and other.split(".")[0] == home.split(".")[0]}
    return any(f"{home}.{names[0]}" in MODULES for home in homes) or any(
        names[0] in defined(file(name)) for name in near)


def prose(path):
    """Docstrings and comments of a file."""
    text = path.read_text(encoding="utf-8")
    nodes = (n for n in ast.walk(ast.parse(text))
             if isinstance(n, (ast.Module, ast.FunctionDef, ast.ClassDef)))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [*filter(None, map(ast.get_docstring, nodes)),
            *(token.string for token in tokens if token.type == tokenize.COMMENT)]


def wrong_names(text):
    """List the dotted names in a text that begin like ours and mean nothing."""
    ours = {name.split(".")[-1] for name in MODULES} - {"model"} | {"minidist", "lessons"}
    found = re.findall(r"(?<![\w./-])[a-z_]\w*(?:\.\w+)+(?![\w/])", text)
    return sorted(name for name in set(found) if name.split(".")[0] in ours and not exists(name)
                  and name.split(".")[-1] not in ("py", "json", "png"))


def test_wrong_names_are_found():
    assert wrong_names("See cost.ddp_bytes, minidist.cost.tq, lessons.rings; minidist.zeros") == [
        "cost.ddp_bytes", "lessons.rings", "minidist.cost.tq", "minidist.zeros"]
    assert not wrong_names("cost.tp, minidist.cost.tp, cost.messages.terms, comm.size, data.py, "
                           "minidist.ranks.comm, lessons.ring, and numpy.linalg.norm")


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name != "tests"] + [
    ROOT / "README.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_dotted_name_in_prose_exists(path):
    texts = prose(path) if path.suffix == ".py" else [path.read_text(encoding="utf-8")]
    wrong = [name for text in texts for name in wrong_names(text)]
    assert not wrong, f"{path.name} speaks of {', '.join(wrong)}"


def test_readme_lists_the_lessons_in_the_reading_order():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [re.findall(r"`lessons\.(\w+)`", line) for line in text.splitlines()
            if line.startswith("|")]
    shown = list(dict.fromkeys(row[-1] for row in rows if row))
    assert shown == [name for name, _, _ in existing()]


def long_functions(path):
    """List the functions of more than 25 lines, docstrings not counted."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            doc = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) else 0
            if node.end_lineno - node.lineno + 1 - doc > 25:
                yield f"{path.relative_to(ROOT)} {node.name}"


def test_a_function_of_more_than_25_lines_has_a_reason():
    """A lesson's main() is its screens, one after another."""
    found = {name for path in FILES if path.parent.name != "tests" for name in long_functions(path)}
    found = {name for name in found if not re.match(r"lessons/\w+.py (main|prove)$", name)}
    assert found <= LONG.keys(), f"two ideas? {', '.join(sorted(found - LONG.keys()))}"


def test_tool_settings_are_in_one_place():
    assert len((ROOT / "pyproject.toml").read_text().splitlines()) == 3
    assert [p.name for p in ROOT.glob("*.toml")] == ["pyproject.toml"]
    assert not [f for f in ("tox.ini", "pytest.ini", "setup.py") if (ROOT / f).exists()]
