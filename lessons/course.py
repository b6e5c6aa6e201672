"""Write a course: what students get, and what stays with the teacher.

    python -m lessons.course DIR [--lessons tp zero ...] [--python python3.10 python3.12]

    students/       for each assignment a README and a stub; minidist without the exercises' bodies
    teacher/        graders for each lesson: a zip for Gradescope, a workflow for GitHub Classroom,
                    a Makefile and a tar for Autolab

All of it is made from the lessons themselves; points, messages and cheats are those of
lessons.grade. The package for students is made for the Pythons that are named: see lessons.handed.
"""
import importlib
import inspect
import io
import os
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

from lessons import exercises, script, strip
from minidist import BadInput, flags
from minidist.ranks import environment, launch

NEEDS = '"numpy>=2.0" "mpi4py>=4.0" matplotlib mpich'
LONG_AGO = (1980, 1, 1, 0, 0, 0)            # what is written depends on nothing but minidist
HOURS = 1                                   # for a point, beside one to read and run the lesson


def main():
    options = parser().parse_args()
    if (environment.size() or 1) > 1:
        raise BadInput("one process writes the course: leave mpirun out")
    plans = [read(name) for name in chosen(options.lessons)]
    write(options.folder, course(plans, options.python))
    print(f"{options.folder}/students   {len(plans)} assignments, {points(plans)} points\n"
          f"{options.folder}/teacher    graders; begin with README.md there")
    return 0


def parser():
    p = flags.Parser(prog="python -m lessons.course", description=__doc__.splitlines()[0],
                     epilog="example: python -m lessons.course spring --lessons ring dp tp zero")
    p.add_argument("folder", metavar="DIR", help="a new folder")
    p.add_argument("--lessons", nargs="+", metavar="NAME", help="which (default: all)")
    p.add_argument("--python", nargs="+", metavar="PYTHON", default=[sys.executable],
                   help="interpreters of the versions that students have (default: this one)")
    return p


def chosen(names):
    """Put lessons into reading order.  Raises BadInput"""
    known = script.names()
    if wrong := set(names or ()) - set(known):
        raise BadInput(f"there is no lesson {min(wrong)}; there are {', '.join(known)}")
    return [name for name in known if name in (names or known)]


def read(name):
    return script.read(importlib.import_module(f"lessons.{name}").SCREENS)


def points(plans):
    return sum(worth(plan, function) for plan in plans for function in plan.exercise)


def worth(plan, function):
    return plan.points.get(function.__name__, 1)


def course(plans, pythons):
    """All that is written.  -> {path: bytes}"""
    found = {f"students/{path}": data for path, data in strip.stripped(
        plans, pythons).items()}
    found["students/README.md"] = overview(plans).encode()
    found["teacher/README.md"] = for_the_teacher(plans).encode()
    library = strip.files()
    for plan in plans:
        found |= assignment(plan) | gradescope(plan, library) | autolab(plan, library)
        found[f"teacher/github/{plan.name}/.github/workflows/classroom.yml"] = (
            workflow(plan).encode())
    return found


def write(folder, found):
    """Write everything, or nothing.  Raises BadInput"""
    part = f"{folder.rstrip(os.sep)}.part"
    if os.path.lexists(folder) and not (os.path.isdir(folder) and not os.listdir(folder)):
        raise BadInput(f"{folder} is there already; name a new folder")
    try:
        shutil.rmtree(part, ignore_errors=True)
        for name, data in found.items():
            path = Path(part, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o755 if executable(name) else 0o644)
        os.replace(part, folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise BadInput(f"cannot write {folder}: {error.strerror}") from None


def executable(name):
    return name.endswith((".sh", "run_autograder"))


# ---- what students get

def assignment(plan):
    """README and stub of one lesson."""
    stub = f"assignments/{plan.name}/{plan.name}.py"
    rows = [f"| `{f.__name__}` | {first_line(f)} | {worth(plan, f)} |" for f in plan.exercise]
    text = f"""# {plan.title}

{plan.question}

First read and run the lesson, and answer its questions before it does:

    python -m lessons.{plan.name} -n 4 --predict

Then write these functions in `{stub}`. Their docstrings there say what is asked for.

| function | what it does | points |
|---|---|---|
{chr(10).join(rows)}

Check yourself, as often as you like. This is what the grader runs, with other random values:

    python -m lessons.{plan.name} --mine {stub}
    python -m lessons.{plan.name} --hint

Hand in `{plan.name}.py`, and nothing else. Expect about {HOURS + points([plan])} hours.
"""
    return {f"students/assignments/{plan.name}/README.md": text.encode(),
            f"students/{stub}": exercises.stub(plan, stub).encode()}


def first_line(function):
    return (inspect.getdoc(function) or "").splitlines()[0].replace("|", "\\|")


def overview(plans):
    rows = [f"| [{plan.name}](assignments/{plan.name}/README.md) | {plan.question} | "
            f"{points([plan])} |" for plan in plans]
    return f"""# Distributed training from scratch

    pip install {NEEDS}

in a virtual environment, then run everything from this folder. `python -m minidist.doctor` says
whether it works.

| assignment | question | points |
|---|---|---|
{chr(10).join(rows)}

The functions of the assignments have no text in this package, only compiled code, so that lessons
that build on them run. It was made for the version of Python that the course uses.
"""


# ---- what stays with the teacher

GRADESCOPE = {"setup.sh": f"""#!/usr/bin/env bash
# Gradescope runs this once, when it builds the image.
set -e
apt-get update && apt-get install -y python3 python3-venv
python3 -m venv /autograder/venv
/autograder/venv/bin/pip install {NEEDS}
""", "run_autograder": """#!/usr/bin/env bash
# Gradescope runs this for each submission; results.json is written whatever happens.
A=${{AUTOGRADER:-/autograder}}
PYTHON=${{PYTHON:-$A/venv/bin/python}}
cd "$A/source" && mkdir -p "$A/results"
"$PYTHON" -m lessons.grade "{name}=$A/submission/{name}.py" --json "$A/grade.json"
"$PYTHON" -m lessons.forms gradescope "$A/grade.json" "$A/results/results.json"
"""}

AUTOLAB = {"Makefile": """# Autolab runs this for each submission, which it calls {name}.py
all:
	tar xf autograde.tar
	cp {name}.py autograde/handed-in.py
	cd autograde && sh driver.sh

clean:
	rm -rf autograde
""", "driver.sh": """# Grade; the last line is what Autolab reads.
PYTHON=${{PYTHON:-python3}}
"$PYTHON" -m lessons.grade {name}=handed-in.py --json grade.json
"$PYTHON" -m lessons.forms autolab grade.json
"""}


def gradescope(plan, library):
    """The zip to upload as autograder."""
    inside = {name: text.format(name=plan.name).encode() if name == "run_autograder"
              else text.encode() for name, text in GRADESCOPE.items()}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted({**library, **inside}.items()):
            info = zipfile.ZipInfo(name, LONG_AGO)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (0o755 if executable(name) else 0o644) << 16
            archive.writestr(info, data)
    return {f"teacher/gradescope/{plan.name}.zip": out.getvalue()}


def autolab(plan, library):
    """The Makefile and the tar to upload as autograder."""
    out = io.BytesIO()
    inside = {**library, "driver.sh": AUTOLAB["driver.sh"].format(name=plan.name).encode()}
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in sorted(inside.items()):
            info = tarfile.TarInfo(f"autograde/{name}")
            info.size, info.mode = len(data), 0o755 if executable(name) else 0o644
            archive.addfile(info, io.BytesIO(data))
    where = f"teacher/autolab/{plan.name}"
    return {f"{where}/autograde.tar": out.getvalue(),
            f"{where}/autograde-Makefile": AUTOLAB["Makefile"].format(name=plan.name).encode()}


def workflow(plan):
    """A workflow that GitHub Classroom runs, with a test for each function."""
    steps, runners = [], []
    for function in plan.exercise:
        runner = function.__name__.replace("_", "-")
        runners.append(runner)
        steps.append(f"""\
      - name: {function.__name__}
        id: {runner}
        uses: classroom-resources/autograding-command-grader@v1
        with:
          test-name: {plan.name}.{function.__name__}
          command: python -m lessons.forms passed grade.json {plan.name}.{function.__name__}
          timeout: 1
          max-score: {worth(plan, function)}
""")
    paper = f"assignments/{plan.name}/{plan.name}.py"
    results = "\n".join(f"          {runner.upper()}_RESULTS: "
                        f"\"${{{{ steps.{runner}.outputs.result }}}}\"" for runner in runners)
    return f"""name: Autograding Tests
on: [push, workflow_dispatch, repository_dispatch]
permissions:
  checks: write
  actions: read
  contents: read
jobs:
  run-autograding-tests:
    runs-on: ubuntu-latest
    if: github.actor != 'github-classroom[bot]'
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "{sys.version_info[0]}.{sys.version_info[1]}"
      - run: pip install {NEEDS}
      - name: grade
        run: python -m lessons.grade {plan.name}={paper} --json grade.json
        continue-on-error: true
{"".join(steps)}\
      - name: report
        uses: classroom-resources/autograding-grading-reporter@v1
        env:
{results}
        with:
          runners: {",".join(runners)}
"""


def for_the_teacher(plans):
    rows = [f"| {plan.name} | {', '.join(f.__name__ for f in plan.exercise)} | {points([plan])} |"
            for plan in plans]
    return f"""# For the teacher

Hand out `students/`, as a repository or an archive. Its self-check is the lesson's own proof.

| lesson | functions | points |
|---|---|---|
{chr(10).join(rows)}

**Gradescope**: upload `gradescope/LESSON.zip` as the autograder of a programming assignment.
Students hand in `LESSON.py`. Each function is a test of its own; their sum is the score.

**GitHub Classroom**: the template repository is `students/`, with the `.github` folder of
`github/LESSON` in it. The workflow and the package lie in the student's repository: what it says is
for the student. For marks, run `python -m lessons.grade` on what was handed in.

**Autolab**: upload `autolab/LESSON/autograde-Makefile` and `autograde.tar`; what is handed in is
called `LESSON.py`. Name the problems as the functions are named, with their points. The image needs
`pip install {NEEDS}`.

**By hand**: `python -m lessons.grade ring.py tp.py --json grade.json`.

The graders are no sandbox against an attacker; these platforms run each submission in a container.
"""


if __name__ == "__main__":
    launch.run(main)
