"""The package for students: minidist and its lessons, without the bodies of the exercises.

    module with bodies  ->  the same module, the bodies gone  +  their code, compiled

Tests are left out: they hold wrong and right solutions. See lessons.handed.
"""
import ast
import json
import subprocess
from pathlib import Path

import lessons
import minidist
from lessons import exercises
from minidist import BadInput

TOP = ("setup.cfg", "pyproject.toml", "LICENSE")
ONLY_OURS = {"lessons/course.py", "lessons/strip.py", "lessons/handouts.py"}
COMPILE = ("import json, sys; from lessons import handed; print(json.dumps([handed.version(), "
           "'%d.%d' % sys.version_info[:2], {m: handed.codes(m, *both) for m, both in "
           "json.load(sys.stdin).items()}]))")


def files():
    """The files of the whole package.  -> {path inside it: bytes}"""
    root = Path(minidist.__file__).parent.parent
    found = {name: (root / name).read_bytes() for name in TOP if (root / name).exists()}
    for package in (minidist, lessons):
        folder = Path(package.__file__).parent
        for path in sorted(folder.rglob("*.py")):
            found[f"{folder.name}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    return found


def stripped(plans, pythons):
    """The files that students get.  plans: lessons whose bodies go; pythons: to compile for

    -> {path: bytes}"""
    found = {name: data for name, data in files().items() if name not in ONLY_OURS}
    sources, functions = {}, [function for plan in plans for function in plan.exercise]
    for function in functions + exercises.withheld(functions):
        path = function.__module__.replace(".", "/") + ".py"
        text = found[path].decode()
        sources.setdefault(function.__module__, [text, []])[1].append(function.__name__)
    for module, (text, names) in sources.items():
        found[module.replace(".", "/") + ".py"] = without(text, names).encode()
    stubs = {plan.name: exercises.stub(plan, "PATH") for plan in plans}
    found["lessons/handed_code.py"] = (compiled(sources, pythons) + f"STUBS = {stubs!r}\n").encode()
    return found


def without(text, names):
    """A module's text without the bodies of some functions, filled in when it is imported."""
    lines, kept, at = text.splitlines(), [], 0
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            first = node.body[0]
            docstring = ast.get_docstring(node) is not None
            kept += lines[at:first.end_lineno if docstring else first.lineno - 1]
            kept += [" " * first.col_offset + "raise NotImplementedError"]
            at = node.end_lineno
    call = ", ".join(["globals()", *map(repr, sorted(names))])
    main = [i for i, line in enumerate(lines) if line.startswith("if __name__ ==")]
    rest = lines[at:main[0] if main else len(lines)]
    fill = ["", "", "from lessons import handed              # noqa: E402", "",
            f"handed.fill({call})", "", ""]
    return "\n".join(kept + rest + fill + lines[main[0] if main else len(lines):]).rstrip() + "\n"


def asked(python, sources):
    """Let an interpreter compile functions.  -> its magic number, its version, {module: codes}"""
    try:
        done = subprocess.run([python, "-c", COMPILE], input=json.dumps(sources), text=True,
                              capture_output=True, cwd=Path(minidist.__file__).parent.parent)
    except OSError as error:
        raise BadInput(f"--python {python}: {error.strerror}; name an interpreter") from None
    if done.returncode:
        said = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise BadInput(f"--python {python} cannot run this package ({said}); install what "
                       "setup.cfg asks for there")
    return json.loads(done.stdout)


def compiled(sources, pythons):
    """The text of lessons/handed_code.py: code for each interpreter."""
    code, versions = {}, []
    for python in pythons:
        magic, version, found = asked(python, sources)
        code[magic] = found
        versions.append(version)
    return ('"""Bodies of the exercises, compiled: see lessons/handed.py."""\n'
            f"PYTHONS = {versions!r}\nCODE = {json.dumps(code, indent=0)}\n")
