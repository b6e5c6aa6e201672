"""A lesson's script as the kit sees it: its header, its proof, its bugs, its flags."""
import os
import sys
from dataclasses import dataclass

from minidist import BadInput, flags


@dataclass(frozen=True)
class Script:
    """One lesson: the names its module defines."""
    name: str
    title: str
    question: str
    header: list
    main: object
    prove: object
    exercise: list
    breaks: list
    flags: dict
    alone: bool


def read(main):
    """Look up what the module of main() defines."""
    names = main.__globals__
    title, question, header = split_header(names["__doc__"])
    spec = names.get("__spec__")
    name = (spec.name if spec else names["__name__"]).split(".")[-1]
    bugs = [f for f in names.values() if hasattr(f, "replaces")]
    return Script(name, title, question, header, main, names.get("prove"),
                  list(names.get("EXERCISE", ())), bugs, names.get("OPTIONS", {}),
                  names.get("ALONE", False))


def split_header(doc):
    """'TITLE   A question? ...' -> title, question, lines"""
    lines = doc.strip().splitlines()
    title, _, question = lines[0].partition("  ")
    return title, question.strip(), lines


def parse(script, argv):
    """Read the command line.  Raises BadInput."""
    command = f"python -m lessons.{script.name}"
    parser = flags.Parser(prog=command, description=script.question,
                          epilog=f"example: mpirun -n 4 {command} --predict")
    add = parser.add_argument
    add("-n", metavar="N", help="start N ranks (instead of mpirun -n N)")
    add("--predict", nargs="?", const="ask", metavar="NUMBERS",
        help="guess before you see: asks on a terminal, or takes your numbers (6,2,1.5)")
    add("--break", dest="break_", metavar="NAME",
        help="plant a bug and see it caught: a name, 'list' or 'mystery'")
    add("--stub", metavar="FILE", help="write the functions of the exercise, bodies empty")
    add("--mine", metavar="FILE", help="put your functions in the module's place and grade them")
    add("--prove", action="store_true", help="only the proof: checks and counts")
    add("--json", metavar="FILE", help="write checks and counts as data")
    add("--out", metavar="DIR", default="out", help="where pictures go (out)")
    add("--no-figure", action="store_true", help="draw no picture")
    for flag, text in script.flags.items():
        add("--" + flag, metavar="VALUE", help=text)
    options = parser.parse_args(list(argv))
    options.processes = False
    _check(script, options)
    return options


def _check(script, options):
    """Refuse what cannot be done, before any rank has said a word to another."""
    names = [bug.title for bug in script.breaks]
    if options.break_ and options.break_ not in (*names, "list", "mystery"):
        raise BadInput(f"lessons.{script.name} has no break named {options.break_!r}; "
                       f"it has {', '.join(names + ['mystery'])}")
    if (options.stub or options.mine) and not script.exercise:
        raise BadInput(f"lessons.{script.name} has no exercise to write")
    for path in (options.stub, options.json, os.path.join(options.out, script.name + ".png")):
        if path:
            flags.writable(path)
    if options.stub and os.path.exists(options.stub):
        raise BadInput(f"{options.stub} exists already; name a new file for the stub")
    if options.mine and not os.path.isfile(options.mine):
        raise BadInput(f"{options.mine} is not a file; --stub {options.mine} writes a first one")
    if options.predict not in (None, "ask"):
        try:
            options.predict = [float(number) for number in options.predict.split(",")]
        except ValueError:
            raise BadInput(f"--predict takes numbers such as 6,2,1.5, not {options.predict!r}"
                           ) from None


def ask(lesson, question):
    """Get the reader's number, or None; waits only where somebody can type.  Rank 0 only"""
    given = lesson.options.predict
    if isinstance(given, list):
        return given.pop(0) if given else None
    if not lesson.can_ask:
        if lesson.can_ask is not None:
            lesson.say("(no terminal to type on: use -n N, not mpirun, or --predict 6,2,1.5)")
        lesson.can_ask = None                              # said once is enough
        return None
    try:
        return float(typed(lesson, question))
    except ValueError:
        return None


def typed(lesson, question):
    """One line from the reader's terminal; "" where there is none.  Rank 0 only"""
    if not terminal():
        return ""
    print("  " + question, end="", file=lesson.out, flush=True)
    return sys.stdin.readline().strip()


def terminal():
    """Whether somebody can type: also on rank 0 of a job that -n N has started from a terminal."""
    return sys.stdin.isatty() or os.environ.get("MINIDIST_TERMINAL") == "1"
