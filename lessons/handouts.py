"""Texts of a course: README files, and what Gradescope, GitHub Classroom and Autolab run.

`python -m lessons.course` fills them in from the lessons.  The forms are those of the platforms'
documentation: results.json (Gradescope), a grader for each test and a reporter (GitHub Classroom),
a last line {"scores": ...} (Autolab).
"""
NEEDS = '"numpy>=2.0" "mpi4py>=4.0" matplotlib mpich'

ASSIGNMENT = """# {plan.title}

{plan.question}

First read and run the lesson, and answer its questions before it does:

    python -m lessons.{plan.name} -n 4 --predict

Then write these functions in `{stub}`. Their docstrings there say what is
asked for.

| function | what it does | points |
|---|---|---|
{rows}

Check yourself, as often as you like. This is what the grader runs, with other random values:

    python -m lessons.{plan.name} --mine {stub}
    python -m lessons.{plan.name} --hint

Hand in `{plan.name}.py`, and nothing else. Expect about {hours} hours.
"""

OVERVIEW = """# Distributed training from scratch

    pip install {needs}

in a virtual environment, then run everything from this folder. `python -m minidist.doctor` says
whether it works.

| assignment | question | points |
|---|---|---|
{rows}

The functions of the assignments have no text in this package, only compiled code, so that lessons
that build on them run. It was made for the version of Python that the course uses.
"""

TEACHER = """# For the teacher

Hand out `students/`, as a repository or an archive. Its self-check is the lesson's own proof.

| lesson | functions | points |
|---|---|---|
{rows}

**Gradescope**: upload `gradescope/LESSON.zip` as the autograder of a programming assignment.
Students hand in `LESSON.py`. Each function is a test of its own; their sum is the score.

**GitHub Classroom**: the template repository is `students/`, with the `.github` folder of
`github/LESSON` in it. The workflow and the package lie in the student's repository: what it says is
for the student. For marks, run `python -m lessons.grade` on what was handed in.

**Autolab**: upload `autolab/LESSON/autograde-Makefile` and `autograde.tar`; what is handed in is
called `LESSON.py`. Name the problems as the functions are named, with their points. The image needs
`pip install {needs}`.

**By hand**: `python -m lessons.grade ring.py tp.py --json grade.json`.

The graders are no sandbox against an attacker; these platforms run each submission in a container.
"""

GRADESCOPE = {"setup.sh": """#!/usr/bin/env bash
# Gradescope runs this once, when it builds the image.
set -e
apt-get update && apt-get install -y python3 python3-venv
python3 -m venv /autograder/venv
/autograder/venv/bin/pip install {needs}
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
\ttar xf autograde.tar
\tcp {name}.py autograde/handed-in.py
\tcd autograde && sh driver.sh

clean:
\trm -rf autograde
""", "driver.sh": """# Grade; the last line is what Autolab reads.
PYTHON=${{PYTHON:-python3}}
"$PYTHON" -m lessons.grade {name}=handed-in.py --json grade.json
"$PYTHON" -m lessons.forms autolab grade.json
"""}

WORKFLOW = """name: Autograding Tests
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
          python-version: "{python}"
      - run: pip install {needs}
      - name: grade
        run: python -m lessons.grade {lesson}={paper} --json grade.json
        continue-on-error: true
{tests}      - name: report
        uses: classroom-resources/autograding-grading-reporter@v1
        env:
{results}        with:
          runners: {runners}
"""

TEST = """      - name: {name}
        id: {runner}
        uses: classroom-resources/autograding-command-grader@v1
        with:
          test-name: {lesson}.{name}
          command: python -m lessons.forms passed grade.json {lesson}.{name}
          timeout: 1
          max-score: {points}
"""

RESULT = """          {variable}_RESULTS: "${{{{ steps.{runner}.outputs.result }}}}"
"""
