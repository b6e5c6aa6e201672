"""The course kit: nothing of a solution is handed out, and every grader gives the same points."""
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from lessons import course, exercises, forms, handed, script, strip
from lessons.grade import normal
from minidist import BadInput

NAMES = script.names()
PLANS = [course.read(name) for name in NAMES]
RIGHT = """
def held(job, state=(2, 2, 12)):
    part = job.divided / job.mine
    P, G, O = (numbers * job.mine for numbers in state)
    if job.zero >= 1:
        O *= part
    if job.zero >= 2:
        G *= part
    if job.zero == 3:
        P = P * part + 2 * job.mine / job.L
    tokens = job.rows * job.T / job.tp
    A = cost.textbook_activations(job.sizes, job.tp, job.sp, job.again or (
        "attention" if job.tiled else None)) * job.layers * min(job.pp, job.microbatches)
    if job.v > 1:
        A += A * (job.pp - 1) / job.pp / job.v
    if job.again == "blocks":
        A += 34 * tokens * job.D
    if job.pp == 1:
        A += 4 * tokens * job.V
    return Held(P, G, O, A / job.cp)


def bubble(job):
    return (job.pp - 1) / job.v / job.microbatches


def sent_to_replicas(job):
    times = [8, 6, 6 * job.microbatches, 8 * job.microbatches][job.zero]
    return times * (job.mine - job.divided)
"""
HALF = RIGHT.replace("/ job.v / job", "/ job")
WRONG = HALF.replace("[8, 6", "[4, 6").replace("if job.zero >= 2", "if job.zero == 2")
HOSTILE = """
import json, os
for where in (".", "..", "/autograder/results", os.environ.get("AUTOGRADER", ".") + "/results"):
    for name in ("grade.json", "results.json"):
        try:
            with open(os.path.join(where, name), "w") as file:
                json.dump({"score": 100, "state": "finished", "records": []}, file)
        except OSError:
            pass
print(json.dumps({"scores": {"held": 100}}))
os._exit(0)
"""


def paper(body):
    plan = PLANS[NAMES.index("plan")]
    head = exercises.stub(plan, "plan.py").partition("def ")[0]
    return head.replace("raise NotImplementedError", "") + body


PAPERS = {"right": (paper(RIGHT), [1, 1, 1]), "half": (paper(HALF), [1, 0, 1]),
          "wrong": (paper(WRONG), [0, 0, 0]), "hostile": (paper(HOSTILE), [0, 0, 0]),
          "empty": (exercises.stub(PLANS[NAMES.index("plan")], "plan.py"), [0, 0, 0])}
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable}
FUNCTIONS = ["held", "bubble", "sent_to_replicas"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("course") / "spring"
    course.write(str(folder), course.course([PLANS[NAMES.index("plan")]], [sys.executable]))
    return folder


def shell(words, folder, **more):
    done = subprocess.run(words, cwd=folder, text=True, capture_output=True,
                          env={**ENVIRONMENT, **more})
    return done


# ---------------------------------------------------------------- what students get

@pytest.fixture(scope="module")
def everything():
    """The package for students if all lessons are assignments.  {path: bytes}"""
    return strip.stripped(PLANS, [sys.executable])


def test_no_body_of_any_exercise_is_handed_out(everything):
    """Neither as text, nor as the same syntax under other names; and no test, no grader's form."""
    functions = [f for plan in PLANS for f in plan.exercise]
    functions += exercises.withheld(functions)
    assert len(functions) > 60
    bodies = {normal(ast.parse(exercises.source(f)).body[0]): f.__name__ for f in functions}
    texts = {f.__name__: text_of(f) for f in functions}
    for path, data in everything.items():
        assert not path.startswith("tests") and path not in strip.ONLY_OURS
        text = data.decode()
        if path.endswith(".py"):
            found = {normal(node) for node in ast.walk(ast.parse(text))
                     if isinstance(node, ast.FunctionDef)}
            assert not found & bodies.keys(), [bodies[body] for body in found & bodies.keys()]
        held = [name for name, body in texts.items() if body in text]
        assert not held, (path, held)


def text_of(function):
    """The lines of a function's body, as they stand in the library."""
    text = exercises.source(function)
    node = ast.parse(text).body[0]
    first = node.body[1 if ast.get_docstring(node) is not None else 0]
    return "\n".join(text.splitlines()[first.lineno - 1:]).strip("\n")


def test_a_body_that_is_left_in_would_be_found(everything):
    """The test above can fail: with the library's own text in place it does."""
    whole = strip.files()
    left = dict(everything, **{"minidist/flash.py": whole["minidist/flash.py"]})
    with pytest.raises(AssertionError, match="merge"):
        test_no_body_of_any_exercise_is_handed_out(left)


def test_signatures_docstrings_and_the_rest_stay(everything):
    text = everything["minidist/collectives/ring.py"].decode()
    whole = strip.files()["minidist/collectives/ring.py"].decode()
    for node in ast.parse(whole).body:
        if isinstance(node, ast.FunctionDef):
            there = next(n for n in ast.parse(text).body if getattr(n, "name", "") == node.name)
            assert ast.unparse(there.args) == ast.unparse(node.args)
            assert ast.get_docstring(there) == ast.get_docstring(node)
    compile(text, "ring.py", "exec")


def test_the_self_check_works_there(made):
    students = made / "students"
    (students / "right.py").write_text(PAPERS["right"][0])
    done = shell([sys.executable, "-m", "lessons.plan", "--mine", "right.py"], students)
    assert done.returncode == 0 and " ok" in done.stdout, done.stdout + done.stderr
    stub = "assignments/plan/plan.py"
    done = shell([sys.executable, "-m", "lessons.plan", "--mine", stub], students)
    assert done.returncode == 1 and "held is not written yet" in done.stdout
    assert (students / stub).read_text() == exercises.stub(PLANS[NAMES.index("plan")], stub)
    done = shell([sys.executable, "-m", "lessons.plan", "--stub", "again.py"], students)
    assert "from minidist.estimate import Held" in (students / "again.py").read_text()


def test_another_python_is_refused_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lessons.handed_code", type(sys)("lessons.handed_code"))
    sys.modules["lessons.handed_code"].CODE = {"00": {}}
    sys.modules["lessons.handed_code"].PYTHONS = ["3.9"]
    with pytest.raises(SystemExit) as ending:
        handed.fill({"__name__": "minidist.flash"}, "merge")
    assert ending.value.code == 2
    assert "error: this package was made for Python 3.9, and this is 3" in capsys.readouterr().err


def test_each_assignment_says_what_is_asked(made):
    text = (made / "students/assignments/plan/README.md").read_text()
    plan = PLANS[NAMES.index("plan")]
    assert plan.question in text and "--mine assignments/plan/plan.py" in text
    assert all(f"| `{name}` |" in text for name in FUNCTIONS) and "about 4 hours" in text
    overview = (made / "students/README.md").read_text()
    assert f"| [plan](assignments/plan/README.md) | {plan.question} | 3 |" in overview


# ---------------------------------------------------------------- the graders

@pytest.mark.parametrize("kind", PAPERS)
def test_gradescope(made, tmp_path, kind):
    """As its documentation says: the zip in /autograder/source, the file in submission."""
    text, points = PAPERS[kind]
    with zipfile.ZipFile(made / "teacher/gradescope/plan.zip") as archive:
        archive.extractall(tmp_path / "source")
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    assert modes["run_autograder"] & modes["setup.sh"] & 0o111
    assert shell(["bash", "-n", "setup.sh"], tmp_path / "source").returncode == 0
    (tmp_path / "submission").mkdir()
    (tmp_path / "submission/plan.py").write_text(text)
    done = shell(["bash", "source/run_autograder"], tmp_path, AUTOGRADER=str(tmp_path))
    result = json.loads((tmp_path / "results/results.json").read_text())
    assert [test["score"] for test in result["tests"]] == points, done.stdout + done.stderr
    assert [test["name"] for test in result["tests"]] == [f"plan.{name}" for name in FUNCTIONS]
    assert "score" not in result and f"{sum(points)} of 3 points" in result["output"]
    for test, point in zip(result["tests"], points):
        assert set(test) == {"name", "number", "score", "max_score", "status", "output",
                             "visibility"}
        assert test["status"] == ("passed" if point else "failed") and test["max_score"] == 1


def test_gradescope_without_a_submission(made, tmp_path):
    with zipfile.ZipFile(made / "teacher/gradescope/plan.zip") as archive:
        archive.extractall(tmp_path / "source")
    done = shell(["bash", "source/run_autograder"], tmp_path, AUTOGRADER=str(tmp_path))
    result = json.loads((tmp_path / "results/results.json").read_text())
    assert result["score"] == 0 and "there is no grade" in result["output"]
    assert "cannot read" in done.stderr


@pytest.mark.parametrize("kind", PAPERS)
def test_autolab(made, tmp_path, kind):
    """Makefile, tar and submission in one folder; the last line is the score of each problem."""
    text, points = PAPERS[kind]
    for name in ("autograde.tar", "autograde-Makefile"):
        shutil.copy(made / "teacher/autolab/plan" / name, tmp_path)
    (tmp_path / "autograde-Makefile").rename(tmp_path / "Makefile")
    (tmp_path / "plan.py").write_text(text)
    with tarfile.open(tmp_path / "autograde.tar") as archive:
        assert all(name.startswith("autograde/") for name in archive.getnames())
    recipe = re.findall(r"^\t(.*)$", (tmp_path / "Makefile").read_text().partition("clean")[0],
                        re.MULTILINE)
    words = ["make", "-s"] if shutil.which("make") else ["sh", "-ec", "\n".join(recipe)]
    done = shell(words, tmp_path)
    last = done.stdout.strip().splitlines()[-1]
    assert json.loads(last) == {"scores": dict(zip(FUNCTIONS, points))}, done.stdout + done.stderr


@pytest.mark.parametrize("kind", PAPERS)
def test_github_classroom(made, tmp_path, kind):
    """The workflow's own commands, in a copy of what students get: a test for each function."""
    text, points = PAPERS[kind]
    work = tmp_path / "repository"
    shutil.copytree(made / "students", work)
    (work / "assignments/plan/plan.py").write_text(text)
    flow = (made / "teacher/github/plan/.github/workflows/classroom.yml").read_text()
    grading, = re.findall(r"run: (python -m lessons\.grade .*)", flow)
    run = ["bash", "-c"]
    python = f"python() {{ {sys.executable} \"$@\"; }}; "
    shell([*run, python + grading], work)
    commands = re.findall(r"command: (.*)", flow)
    passed = [shell([*run, python + command], work).returncode == 0 for command in commands]
    assert passed == [bool(point) for point in points]
    assert re.findall(r"max-score: (\d+)", flow) == ["1"] * 3
    runners = re.findall(r"id: (.*)", flow)
    assert f"runners: {','.join(runners)}" in flow
    assert f'python-version: "{sys.version_info[0]}.{sys.version_info[1]}"' in flow
    assert all(f"{runner.upper()}_RESULTS: \"${{{{ steps.{runner}.outputs.result }}}}\"" in flow
               for runner in runners)


def test_the_forms_agree_with_the_records():
    records = [dict(lesson="ring", function=name, points=n, possible=2, ok=n == 2, check="",
                    message="" if n else "wrong") for name, n in (("a", 2), ("b", 0))]
    grade = dict(state="finished", seed=5, points=2, possible=4, records=records)
    tests = forms.gradescope(grade)["tests"]
    assert [(t["name"], t["score"], t["output"]) for t in tests] == [
        ("ring.a", 2, "ok"), ("ring.b", 0, "wrong")]
    assert json.loads(forms.autolab(grade)) == {"scores": {"a": 2, "b": 0}}
    assert "has not finished (interrupted)" in forms.gradescope(dict(grade, state="interrupted"))[
        "output"]


# ---------------------------------------------------------------- the command

def test_the_same_course_twice_is_the_same_bytes():
    plans = [PLANS[NAMES.index("flash")]]
    assert course.course(plans, [sys.executable]) == course.course(plans, [sys.executable])


@pytest.mark.parametrize("argv, words", [
    (["--lessons", "rings"], "there is no lesson rings"), (["--python", "python9"], "python9"),
    (["--python", "false"], "cannot run this package")])
def test_what_cannot_be_written_is_one_sentence(tmp_path, argv, words, monkeypatch):
    folder = tmp_path / "new"
    monkeypatch.setattr(sys, "argv", ["course", str(folder), *(
        ["--lessons", "plan"] if "--lessons" not in argv else []), *argv])
    with pytest.raises(BadInput, match=words):
        course.main()
    assert not list(tmp_path.iterdir())


def test_no_folder_is_overwritten(tmp_path):
    (tmp_path / "mine").write_text("dear")
    with pytest.raises(BadInput, match="is there already"):
        course.write(str(tmp_path), {"a": b""})
    with pytest.raises(BadInput, match="cannot write"):
        course.write(str(tmp_path / "mine" / "new"), {"a": b""})
    assert [path.name for path in Path(tmp_path).iterdir()] == ["mine"]


def test_the_syllabus_names_every_lesson_once():
    """README's weeks: lessons that exist, functions of their exercises."""
    text = Path("README.md").read_text(encoding="utf-8")
    table = text.partition("| week |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1:-1] for row in table.splitlines()[2:]]
    named = [name for _, lessons, _ in rows for name in re.findall(r"`(\w+)`", lessons)]
    assert named == sorted(named, key=NAMES.index) and sorted(named) == sorted(NAMES)
    functions = {plan.name: [f.__name__ for f in plan.exercise] for plan in PLANS}
    for _, lessons, asked in rows:
        of_week = [f for name in re.findall(r"`(\w+)`", lessons) for f in functions[name]]
        assert set(re.findall(r"`(\w+)`", asked)) <= set(of_week) and "`" in asked
