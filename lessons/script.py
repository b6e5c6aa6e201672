"""A lesson's script as the kit sees it: its header, its screens, its bugs, its flags; the order."""
import ast
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lessons import guess, hints
from minidist import BadInput, files, flags

# From what one step needs, over the walls it meets, to the techniques, then their combination.
ORDER = ("walls step memory collectives ring mesh dp zero recompute offload precision compress tp "
         "sp flash cp ulysses pp schedules moe ep checkpoint plan rates").split()

# On how many ranks the sizes of a lesson divide; on any number, where none is named.
UP_TO_6 = 1, 2, 3, 4, 6
RANKS = dict(dict.fromkeys("recompute precision tp sp cp ulysses".split(), UP_TO_6),
             zero=(1, 2, 3, 4, 5, 6), pp=(1, 2, 3, 4), checkpoint=(1, 2, 3, 4))


@dataclass(frozen=True)
class Script:
    """One lesson: the names its module defines."""
    name: str
    title: str
    question: str
    header: list
    screens: list
    prove: object
    exercise: list
    points: dict
    breaks: list
    close: tuple
    flags: dict
    alone: bool


def read(screens):
    """Look up what the module of the screens defines."""
    names = screens[0].__globals__
    title, question, header = split_header(names["__doc__"])
    spec = names.get("__spec__")
    name = (spec.name if spec else names["__name__"]).split(".")[-1]
    bugs = [f for f in names.values() if hasattr(f, "replaces")]
    close = names.get("TAKEAWAY", ""), names.get("FIELD", ""), names.get("TRY", ())
    return Script(name, title, question, header + neighbours(name), screens, names.get("prove"),
                  list(names.get("EXERCISE", ())), names.get("POINTS", {}), bugs, close,
                  names.get("OPTIONS", {}), names.get("ALONE", False))


def split_header(doc):
    """'TITLE   A question? ...' -> title, question, lines"""
    lines = doc.strip().splitlines()
    title, _, question = lines[0].partition("  ")
    return title, question.strip(), lines


def names():
    """The names of the lessons that exist, in reading order."""
    return [name for name in ORDER if find_spec(f"lessons.{name}")]


def chosen(wanted):
    """Put lessons into reading order; None: all.  Raises BadInput"""
    known = names()
    if wrong := set(wanted or ()) - set(known):
        raise BadInput(f"there is no lesson {min(wrong)}; there are {', '.join(known)}")
    return [name for name in known if name in (wanted or known)]


def existing():
    """The lessons that exist, in reading order.  -> [(name, title, question)]"""
    for name in names():
        doc = ast.get_docstring(ast.parse(Path(find_spec(f"lessons.{name}").origin).read_text()))
        yield (name, *split_header(doc)[:2])


def neighbours(name):
    """The header's last line: which lesson comes before this one, which next."""
    order = names()
    if name not in order:
        return []
    at = order.index(name)
    before = f"lessons.{order[at - 1]}" if at else "python -m minidist.doctor"
    after = f"lessons.{order[at + 1]}" if at + 1 < len(order) else "your own experiment"
    return [f"  before  {before:30}  next  {after}"]


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
    add("--hint", nargs="?", const="", metavar="FUNCTION", help="what to think of first")
    add("--prove", action="store_true", help="only the proof: checks and counts")
    add("--json", metavar="FILE", help="write checks, counts and guesses as data")
    add("--out", metavar="DIR", default="out", help="where pictures go (out)")
    add("--no-figure", action="store_true", help="draw no picture")
    for flag, text in script.flags.items():
        add("--" + flag, metavar="VALUE", help=text)
    options = parser.parse_args(list(argv))
    options.processes = options.lost = False
    _check(script, options)
    return options


def _check(script, options):
    """Refuse what cannot be done, before any rank has said a word to another."""
    names = [bug.title for bug in script.breaks]
    if options.break_ and options.break_ not in (*names, "list", "mystery"):
        raise BadInput(f"lessons.{script.name} has no break named {options.break_!r}; "
                       f"it has {', '.join(names + ['mystery'])}")
    hints.check(script, options.hint)
    if (options.stub or options.mine) and not script.exercise:
        raise BadInput(f"lessons.{script.name} has no exercise to write")
    if options.mine and not os.path.isfile(options.mine):
        raise BadInput(f"{options.mine} is not a file; --stub {options.mine} writes a first one")
    if options.predict not in (None, "ask"):
        options.predict = guess.listed(options.predict)


def look_around(lesson):
    """Refuse, before anything is shown, what cannot be done on these ranks, here.  BadInput"""
    options, name = lesson.options, lesson.script.name
    fits = RANKS.get(name)
    if fits and lesson.comm.size not in fits and not options.stub:
        raise BadInput(f"lessons.{name} has sizes that divide over {', '.join(map(str, fits))} "
                       f"ranks, and {lesson.comm.size} are running; start one of these numbers")
    trouble = lesson.share(lambda: need_files(lesson) or need_terminal(lesson))
    if trouble:
        raise BadInput(trouble)


def need_files(lesson):
    """Say what is in the way of a file that this lesson is to write, or ""."""
    options = lesson.options
    figure = None if options.no_figure else os.path.join(options.out, lesson.script.name + ".png")
    others = [getattr(options, flag) for flag in lesson.script.flags]      # each names a file
    if options.stub and os.path.lexists(options.stub):
        return f"{options.stub} exists already; name a new file for the stub"
    try:
        files.ready(options.stub, options.json, figure, *others, keep=[options.mine])
        if figure:
            files.drawable()
    except BadInput as error:
        return f"{error}" + "; or draw none, with --no-figure" * ("picture" in str(error))
    return ""


def need_terminal(lesson):
    """Say what is in the way of a reader who is to type, or ""."""
    options, name = lesson.options, lesson.script.name
    asks = "--predict" * (options.predict == "ask") + "--break mystery" * (
        options.break_ == "mystery")
    if not asks or guess.terminal():
        return ""
    return (f"{asks} asks, and no terminal reaches rank 0 here: start it with "
            f"python -m lessons.{name} -n {lesson.comm.size} {asks}"
            + (", or give numbers: --predict 6,2,1.5" if options.predict else ""))
