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

from lessons import exercises, handouts, script, strip
from minidist import BadInput, flags
from minidist.ranks import environment, launch

LONG_AGO = (1980, 1, 1, 0, 0, 0)            # what is written depends on nothing but minidist
HOURS = 1                                   # for a point, beside one to read and run the lesson


def main():
    options = parser().parse_args()
    if (environment.size() or 1) > 1:
        raise BadInput("one process writes the course: leave mpirun out")
    plans = [read(name) for name in script.chosen(options.lessons)]
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
    library, version = strip.files(), strip.asked(pythons[0], {})[1]
    for plan in plans:
        found |= assignment(plan) | gradescope(plan, library) | autolab(plan, library)
        found[f"teacher/github/{plan.name}/.github/workflows/classroom.yml"] = (
            workflow(plan, version).encode())
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
            path.chmod(mode(name))
        os.replace(part, folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise BadInput(f"cannot write {folder}: {error.strerror}") from None


def mode(name):
    return 0o755 if name.endswith((".sh", "run_autograder")) else 0o644


# ---- what students get

def assignment(plan):
    """README and stub of one lesson."""
    stub = f"assignments/{plan.name}/{plan.name}.py"
    rows = [f"| `{f.__name__}` | {first_line(f)} | {worth(plan, f)} |" for f in plan.exercise]
    text = handouts.ASSIGNMENT.format(plan=plan, stub=stub, rows="\n".join(rows),
                                      hours=HOURS + points([plan]))
    return {f"students/assignments/{plan.name}/README.md": text.encode(),
            f"students/{stub}": exercises.stub(plan, stub).encode()}


def first_line(function):
    return (inspect.getdoc(function) or "").splitlines()[0].replace("|", "\\|")


def overview(plans):
    rows = [f"| [{plan.name}](assignments/{plan.name}/README.md) | {plan.question} | "
            f"{points([plan])} |" for plan in plans]
    return handouts.OVERVIEW.format(needs=handouts.NEEDS, rows="\n".join(rows))


# ---- what stays with the teacher

def gradescope(plan, library):
    """The zip to upload as autograder."""
    inside = {name: text.format(name=plan.name, needs=handouts.NEEDS).encode()
              for name, text in handouts.GRADESCOPE.items()}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted({**library, **inside}.items()):
            info = zipfile.ZipInfo(name, LONG_AGO)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = mode(name) << 16
            archive.writestr(info, data)
    return {f"teacher/gradescope/{plan.name}.zip": out.getvalue()}


def autolab(plan, library):
    """The Makefile and the tar to upload as autograder."""
    out, where = io.BytesIO(), f"teacher/autolab/{plan.name}"
    driver = handouts.AUTOLAB["driver.sh"].format(name=plan.name).encode()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in sorted({**library, "driver.sh": driver}.items()):
            info = tarfile.TarInfo(f"autograde/{name}")
            info.size, info.mode = len(data), mode(name)
            archive.addfile(info, io.BytesIO(data))
    makefile = handouts.AUTOLAB["Makefile"].format(name=plan.name).encode()
    return {f"{where}/autograde.tar": out.getvalue(), f"{where}/autograde-Makefile": makefile}


def workflow(plan, version):
    """A workflow that GitHub Classroom runs, with a test for each function."""
    runners = {f.__name__: f.__name__.replace("_", "-") for f in plan.exercise}
    tests = [handouts.TEST.format(name=name, runner=runner, lesson=plan.name,
                                  points=plan.points.get(name, 1))
             for name, runner in runners.items()]
    results = [handouts.RESULT.format(variable=runner.upper(), runner=runner)
               for runner in runners.values()]
    return handouts.WORKFLOW.format(
        lesson=plan.name, paper=f"assignments/{plan.name}/{plan.name}.py", needs=handouts.NEEDS,
        python=version, tests="".join(tests),
        results="".join(results), runners=",".join(runners.values()))


def for_the_teacher(plans):
    rows = [f"| {plan.name} | {', '.join(f.__name__ for f in plan.exercise)} | {points([plan])} |"
            for plan in plans]
    return handouts.TEACHER.format(needs=handouts.NEEDS, rows="\n".join(rows))


if __name__ == "__main__":
    launch.run(main)
