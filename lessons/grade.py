"""Grade readers' files: every function alone, with the library's others in place.

    python -m lessons.ring --stub ring.py                      a file to fill in
    python -m lessons.grade ring.py tp.py --json grade.json    its points, function by function

A function gets its points if the lesson's own proof passes with it in the library's place, on 1, 2,
3 and 4 ranks: values, bytes and messages. It runs in processes of its own, with limits, and is
checked for the usual cheats; that is no sandbox against an attacker. Status 0: graded, whatever the
grade; 2: nothing to grade. The JSON file is there from the beginning, as "did not finish".
"""
import ast
import functools
import importlib
import io
import os
import random
import re
import signal
from pathlib import Path

from lessons import exercises, fence, judge, kit, script, session
from lessons.substitute import Outcome
from minidist import BadInput, files, flags
from minidist.ranks import environment, launch
from minidist.ranks.comm import solo

TELLING = 80      # nodes of a function's syntax: from here on two authors do not write the same


def main():
    options = parser().parse_args()
    if (environment.size() or 1) > 1:
        raise BadInput("one process grades, and starts others itself: leave mpirun out")
    files.ready(options.json, keep=[split(given)[1] for given in options.files])
    papers = [Paper(path) for path in options.files]
    names = [paper.script.name for paper in papers]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BadInput(f"two files are for lessons.{min(twice)}: grade them one after the other")
    return grade(papers, options)


def parser():
    p = flags.Parser(prog="python -m lessons.grade", description=__doc__.splitlines()[0],
                     epilog="example: python -m lessons.grade ring.py tp.py --json grade.json")
    p.add_argument("files", nargs="+", metavar="FILE", help="written by a lesson's --stub, and "
                   "filled in; ring=FILE: for this lesson, whatever the file says")
    p.add_argument("--json", metavar="OUT", help="write the records as data")
    p.add_argument("--seed", type=flags.integer(0), default=random.randrange(10 ** 6),
                   help="what the proofs' random values come from (default: drawn, and shown)")
    p.add_argument("--seconds", type=flags.integer(1), default=300, help="of computing, for each "
                   "process of a function; ten times as many in all (default 300)")
    p.add_argument("--megabytes", type=flags.integer(256), default=4096,
                   help="for each process (default 4096)")
    return p


class Paper:
    """One file, the lesson that it belongs to, and a record for each function of that."""

    def __init__(self, given):
        lesson, self.path = split(given)
        try:
            self.source = Path(self.path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"cannot read {self.path}: "
                           f"{getattr(error, 'strerror', None) or error}") from None
        lesson = lesson or lesson_of(self.path, self.source)
        self.script = script.read(importlib.import_module(f"lessons.{lesson}").SCREENS)
        self.records = [dict(lesson=self.script.name, function=f.__name__, points=0,
                             possible=self.script.points.get(f.__name__, 1), ok=False, check="",
                             message="did not finish") for f in self.script.exercise]
        self.sent = {}                                # ranks -> bytes of the library's own proof


def split(given):
    """Take ring=mine.py apart.  -> lesson or "", path"""
    name, equals, path = given.partition("=")
    known = script.names()
    return (name, path) if equals and name in known else ("", given)


def lesson_of(path, source):
    """The lesson that a file names, as a stub does.  Raises BadInput"""
    known = script.names()
    found = [name for name in re.findall(r"lessons\.(\w+)", source) if name in known]
    if not found:
        raise BadInput(f"{path} names no lesson as a stub does: give it one, such as ring={path}")
    return found[0]


# ---- grading

def grade(papers, options):
    """Fill in and print the records; the JSON file is true at every moment.  -> exit status"""
    records = [record for paper in papers for record in paper.records]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, functools.partial(interrupted, records, options))
    save(records, options, "did not finish")
    for paper in papers:
        for function, record in zip(paper.script.exercise, paper.records):
            record.update(one(paper, function, options))
            show(record)
            save(records, options, "did not finish")
    close(records, options)
    return 0 if save(records, options, "finished") else 1


def interrupted(records, options, number, frame):
    """End at once, here: an exception that a signal raises may get lost in a callback."""
    save(records, options, "interrupted")
    for running in list(session.OPEN):
        running.abandon()
    os._exit(128 + number)


def save(records, options, state):
    """Write all records as data.  -> is nothing missing?"""
    return files.attempt(options.json, files.numbers(dict(
        state=state, seed=options.seed, points=sum(r["points"] for r in records),
        possible=sum(r["possible"] for r in records), records=records)))


def one(paper, function, options):
    """Grade one function.  -> what its record says: points, ok, check, message"""
    note = copied(paper.source, function)
    if note.startswith("a copy"):
        return failed(note)
    task = judge.Task(function, paper.script.exercise, modules(paper.script), paper.source,
                      os.path.basename(paper.path), options.seconds, options.megabytes)
    try:
        for ranks in [1] if paper.script.alone else exercises.SIZES:
            wrong = proof(paper, ranks, options.seed, task)
            if wrong:
                return wrong
    finally:
        task.end()
    return dict(points=paper.script.points.get(function.__name__, 1), ok=True, check="",
                message=note)


def proof(paper, ranks, seed, task):
    """Run the proof on so many ranks.  -> {} or what is wrong"""
    options = script.parse(paper.script, ["--no-figure"])
    lesson = kit.Lesson(solo(), paper.script, options, io.StringIO())
    if ranks not in paper.sent:
        own, paper.sent[ranks] = judge.trial(lesson, ranks, seed)
        if not own.ok:
            raise BadInput(f"no grade: lessons.{paper.script.name} fails on the library itself "
                           f"with --seed {seed}: {own.failed[:1]}")
    outcome, sent = judge.trial(lesson, ranks, seed, task)
    where = "1 rank: " if ranks == 1 else f"{ranks} ranks: "
    if not outcome.ok:
        return failed(where + said(outcome, task), first_check(outcome))
    if sent > judge.MORE * paper.sent[ranks]:
        return failed(f"{where}{sent:,} bytes in the whole proof, where the library's function "
                      f"sends {paper.sent[ranks]:,}: more than what is counted", "traffic")
    return {}


def failed(message, check=""):
    return dict(points=0, ok=False, check=check, message=message)


def said(outcome: Outcome, task):
    """What is wrong, in one line or a report of who waits for whom."""
    return (outcome.failed or [f"{task.name} was never called"])[0]


def first_check(outcome):
    """The name of the check or count that failed: it holds no measurement."""
    wrong = [r for r in outcome.checks + outcome.ledger if not r["ok"]]
    if outcome.error or not wrong:
        return "runs"
    return wrong[0].get("name") or wrong[0]["quantity"]


def modules(plan):
    """Whose names a file may use: the exercise's modules, and what its stub imports from."""
    lines = [line.split() for line in exercises.imports(plan.exercise)]
    stub = {words[1] for words in lines if words[:1] == ["from"]}
    inner = {f"{words[1]}.{name.strip(',')}" for words in lines if words[:1] == ["from"]
             for name in words[3:]}
    return {f.__module__ for f in plan.exercise} | {m for m in stub | inner
                                                    if m.startswith("minidist.")}


# ---- copies

def copied(source, function):
    """Is the reader's function the library's, up to names?  -> "a copy ...", a note, or "" """
    try:
        own = normal(ast.parse(exercises.source(function)).body[0])
        found = [normal(node) for node in ast.walk(ast.parse(source))
                 if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError, RecursionError):  # its process will say so
        return ""
    if own not in found:
        return ""
    if own.count("(") >= TELLING:
        return f"a copy of the library's {function.__name__}, up to names"
    return "the library's text; too short to tell a copy"


def normal(node):
    """A function's text without docstring, annotations and the names of what it binds."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    names = {}
    for inner in ast.walk(node):
        if isinstance(inner, ast.arg):
            names.setdefault(inner.arg, f"v{len(names)}")
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.setdefault(inner.id, f"v{len(names)}")
    text = ast.dump(ast.Module(body, []))
    return re.sub(r"(id|arg)='(\w+)'", lambda m: f"{m[1]}='{names.get(m[2], m[2])}'", text)


# ---- what is shown

def show(record):
    name = f"{record['lesson']}.{record['function']}"
    print(f"{name:40} {record['points']} of {record['possible']}  "
          + ("ok" if record["ok"] else "FAILED"), flush=True)
    if record["message"]:
        print("    " + record["message"].replace("\n", "\n    "), flush=True)


def close(records, options):
    points, possible = (sum(r[key] for r in records) for key in ("points", "possible"))
    print(f"{points} of {possible} points, seed {options.seed}")
    if missing := fence.lacking():
        print(f"this platform sets no limit on {', '.join(missing)}")


if __name__ == "__main__":
    launch.run(main)
