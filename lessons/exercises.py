"""The lessons' exercises: write an empty version of a module's functions, grade a reader's version.

    python -m lessons.ring --stub mine.py       then fill in the bodies, and
    python -m lessons.ring --mine mine.py       (or with mpirun -n 4 in front)

The grade is the lesson's own proof: the same values, bytes and messages are demanded of the
reader's functions as of the module's. It runs on 1, 2, 3 and 4 thread ranks, with sends that wait
for their receivers, and then on the ranks of the job; it stops where something is wrong.
"""
import ast
import inspect
import os
import sys
import textwrap
from functools import partial
from importlib.util import module_from_spec, resolve_name, spec_from_file_location

from lessons import substitute
from minidist import BadInput

try:
    from lessons.handed_code import STUBS              # where bodies are gone: lessons.handed
except ImportError:
    STUBS = {}

SIZES = (1, 2, 3, 4)


def replacements(script, path):
    """What --mine puts in the module's place.  -> [(owner, name, the reader's function)]"""
    if not path:
        return []
    module = load(path)
    missing = [f.__name__ for f in script.exercise if not hasattr(module, f.__name__)]
    if missing:
        raise BadInput(f"{path} does not define {', '.join(missing)}; "
                       f"python -m lessons.{script.name} --stub FILE shows what is needed")
    return [(sys.modules[f.__module__], f.__name__, getattr(module, f.__name__))
            for f in script.exercise]


def load(path):
    """Import the reader's file.  Raises BadInput with its line if that fails."""
    path = os.path.abspath(path)
    spec = spec_from_file_location("mine", path)
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise BadInput(f"{path}, line {error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise BadInput(f"importing {substitute.describe(error, path)}") from None
    return module


# ---- --stub

def write_stub(lesson):
    """Write FILE: imports, signatures and docstrings of the exercise, bodies to be filled in."""
    script, path = lesson.script, lesson.options.stub
    if not lesson.write(path, lambda file: file.write(stub(script, path).encode())):
        return
    names = ", ".join(f"{f.__module__}.{f.__name__}" for f in script.exercise)
    lesson.say(f"{path}: write {names}; then\n  python -m lessons.{script.name} --mine {path}")


def stub(script, path, body=None):
    """The text of the file.  body(function): each function's text, and that of helpers that belong
    to the answer; by default an empty one."""
    if body is None and script.name in STUBS:
        return STUBS[script.name].replace("PATH", path)
    head = [f'"""{script.title}, by hand.  Fill in the bodies, then',
            "",
            f"    python -m lessons.{script.name} --mine {path}",
            f"    python -m lessons.{script.name} --hint            what to think of first",
            '"""']
    functions = script.exercise + (withheld(script.exercise) if body else [])
    parts = ["\n".join(head + imports(functions))]
    parts += [(body or empty)(function) for function in functions]
    return "\n\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def withheld(exercise):
    """The private helpers that only functions of the exercise call: they are part of the answer."""
    found, own = [], {function.__name__ for function in exercise}
    for module in {function.__module__: sys.modules[function.__module__] for function in exercise
                   }.values():
        top = [node for node in ast.parse(inspect.getsource(module)).body
               if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        uses = {node.name: {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
                for node in top}
        for name in filter(lambda name: name.startswith("_"), uses):
            users = {other for other, used in uses.items() if name in used and other != name}
            if users and users <= own:
                found.append(getattr(module, name))
    return found


def imports(exercise):
    """Import lines for what the exercise uses: NumPy, imports of its modules, their own helpers."""
    own = {function.__name__ for function in [*exercise, *withheld(exercise)]}
    found = {}
    for function in exercise:
        tree = ast.parse(source(function))
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - own
        for name, line in origins(sys.modules[function.__module__]).items():
            if name in used:
                found.setdefault(line, set()).add(name)
    return ["import numpy as np"] + ([""] if found else []) + [
        f"{line} {', '.join(sorted(names))}" for line, names in sorted(found.items())]


def origins(module):
    """Where each global name of a module comes from.  -> {name: "from x import"}"""
    where = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), module.__package__)
            where.update((alias.name, f"from {source} import") for alias in node.names)
        elif isinstance(node, ast.Import):
            where.update((alias.name, "import") for alias in node.names if not alias.asname)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            where[node.name] = f"from {module.__name__} import"
        elif isinstance(node, ast.Assign):
            names = [n.id for target in node.targets for n in ast.walk(target)
                     if isinstance(n, ast.Name)]
            where.update((name, f"from {module.__name__} import") for name in names)
    return where


def source(thing):
    """The library's text of a function or class."""
    return textwrap.dedent(inspect.getsource(thing))


def empty(thing):
    """Signature and docstring of a function, or of a class's methods, without the bodies."""
    text = source(thing)
    lines, kept, at = text.splitlines(), [], 0
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    for node in sorted(nodes, key=lambda node: node.lineno):
        if node.lineno <= at:
            continue                                     # inside a body that is gone already
        first = node.body[0]
        start = first.lineno - 1
        if ast.get_docstring(node) is not None:
            start = first.end_lineno
        kept += lines[at:start] + [" " * first.col_offset + "raise NotImplementedError"]
        at = node.end_lineno
    return "\n".join(kept + lines[at:])


# ---- --mine

def grade(lesson):
    """Prove the reader's functions on thread ranks of several sizes, then on this job's ranks."""
    names = ", ".join(f"{f.__module__}.{f.__name__}" for f in lesson.script.exercise)
    lesson.say(f"\n{lesson.options.mine} in the place of {names}\n")
    for ranks in [1] if lesson.script.alone else sorted({*SIZES, lesson.comm.size}):
        outcome = lesson.share(partial(try_on, lesson, ranks))
        if not report(lesson, ranks, substitute.Outcome(**outcome)):
            return
    if lesson.comm.size > 1:
        real = lesson.quietly(lesson.comm)
        lesson.script.prove(real)
        report(lesson, lesson.comm.size, substitute.Outcome(real.checks, real.counts), "processes")


def try_on(lesson, ranks):
    return vars(substitute.trial(lesson, ranks, sync=True))


def report(lesson, ranks, outcome, kind="ranks"):
    """One line for one size, more where it failed.  -> whether it passed"""
    label = "1 rank" if ranks == 1 else f"{ranks} {kind}"
    counts = f"{len(outcome.checks)} checks, {len(outcome.ledger)} counts"
    lesson.say(f"{label:12} {counts:24} " + ("ok" if outcome.ok else "FAILED"))
    for line in outcome.failed[:4]:
        lesson.say(f"    {line}")
    for record in outcome.checks + outcome.ledger:
        key = "name" if "name" in record else "quantity"
        record[key] += f", {label}"
    lesson.checks += outcome.checks
    lesson.counts += outcome.ledger
    if not outcome.ok and (outcome.error or not outcome.checks):
        lesson.checks.append(dict(name=f"runs on {label}", error=None, bound=0.0, ok=False))
    return outcome.ok
