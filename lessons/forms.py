"""A grade in the forms that course platforms read, all from the records of lessons.grade.

    python -m lessons.forms gradescope grade.json results.json     what Gradescope shows
    python -m lessons.forms autolab grade.json                     the line that Autolab reads
    python -m lessons.forms passed grade.json ring.all_reduce      status 0 if so: GitHub Classroom

Where the grade has not even begun (no file was handed in, say), every form says so: 0 points.
"""
import json
import sys

from minidist import BadInput, files
from minidist.ranks import launch


def read(path):
    """Read what lessons.grade has written.  -> dict; without records if there is none"""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        return dict(state=f"there is no grade: {error}", points=0, possible=0, records=[])


def gradescope(grade):
    """-> results.json: a test for each function; the score is their sum"""
    tests = [dict(name=name(record), number=str(i), score=record["points"],
                  max_score=record["possible"], status="passed" if record["ok"] else "failed",
                  output=record["message"] or "ok", visibility="visible")
             for i, record in enumerate(grade["records"], 1)]
    result = dict(output=ended(grade), visibility="visible", stdout_visibility="visible")
    return dict(result, tests=tests) if tests else dict(result, score=0)


def autolab(grade):
    """-> the last line of what a driver prints: a score for each problem, named as functions are"""
    return json.dumps(dict(scores={record["function"]: record["points"]
                                   for record in grade["records"]}))


def name(record):
    return f"{record['lesson']}.{record['function']}"


def ended(grade):
    if grade["state"] != "finished":
        return f"The grader has not finished ({grade['state']})."
    return (f"{grade['points']} of {grade['possible']} points.  Repeat it: python -m lessons.grade "
            f"FILE --seed {grade['seed']}")


def main():
    form, path, *more = [*sys.argv[1:], "", ""][:max(2, len(sys.argv) - 1)]
    grade = read(path)
    if form == "gradescope" and len(more) == 1:
        return files.deliver(("results", more[0], files.numbers(gradescope(grade))))
    if form == "autolab" and not more:
        print(autolab(grade))
        return 0
    if form == "passed" and len(more) == 1:
        found = [record for record in grade["records"] if name(record) == more[0]]
        print(found[0]["message"] or "ok" if found else ended(grade))
        return 0 if found and found[0]["ok"] else 1
    raise BadInput("say what to write: gradescope GRADE RESULTS, autolab GRADE, or passed GRADE "
                   "LESSON.FUNCTION")


if __name__ == "__main__":
    launch.run(main)
