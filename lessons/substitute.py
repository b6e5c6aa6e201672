"""Put other functions in a module's place: planted bugs, and a reader's own solutions.

Both are tried in the same way. The lesson's proof runs on thread ranks inside one process, with
synchronous sends if wanted, so that a wrong function ends in a failed check, an exception, or an
exact report of who waits for whom; never in a job that hangs.
"""
import builtins
import functools
import inspect
import operator
import os
import random
import re
import sys
import textwrap
import traceback
import types
from contextlib import contextmanager
from dataclasses import dataclass, field

from lessons.guess import typed
from lessons.proving import Enough
from lessons.tables import WIDTH
from minidist.ranks.comm import Deadlock, run_threads

OURS = ("minidist", "lessons", "__main__")
TIMEOUT = 600                                        # seconds until a trial counts as endless


def breaks(owner, name, ranks=None, sync=False, first=None):
    """Mark a function of a lesson as a planted bug: it takes the place of owner's function `name`.

    owner: a module or class.  ranks: fewest ranks on which it shows (at least 2).  sync: the bug
    hides behind buffered sends; it is tried with those first, then with synchronous ones.
    first: text of the first line of its source worth showing.
    The docstring's first line says what is wrong; the rest says why it matters.
    The function may call the right one as `its_own_name.original`.
    """
    def mark(function):
        function.replaces = (owner, name)
        function.ranks, function.sync, function.first = ranks or 2, sync, first
        function.original = getattr(owner, name)
        function.title = function.__name__.replace("_", "-")
        return function
    return mark


@contextmanager
def patched(*replacements):
    """Replace (owner, name, function) wherever our modules hold it, in tables of any depth too.

    What functions keep of earlier calls is forgotten before and after."""
    undo = []
    try:
        for owner, name, new in replacements:
            old = vars(owner)[name]
            undo.append((setattr, owner, name, old))
            setattr(owner, name, new)
            if not isinstance(owner, type):
                _rebind(old, new, undo)
        _forget()
        yield
    finally:
        for restore, *where in reversed(undo):
            restore(*where)
        _forget()


def _rebind(old, new, undo):
    """Let every name, table entry, partial and default argument that means `old` mean `new`."""
    seen = {id(vars(builtins))}
    for module in _modules():
        _swapped(vars(module), old, new, undo, seen)


def _swapped(value, old, new, undo, seen):
    """Return value with `new` wherever in it `old` was.

    Dictionaries, lists, functions and classes are changed in place, and undo lists how to restore
    them; a tuple or a partial cannot change, so another one takes its place."""
    def swap(inner):
        return _swapped(inner, old, new, undo, seen)

    if value is old:
        return new
    if isinstance(value, tuple):
        inside = [swap(entry) for entry in value]
        if all(map(operator.is_, inside, value)):
            return value
        return value._make(inside) if hasattr(value, "_make") else tuple(inside)
    if type(value) is functools.partial:
        held = value.func, value.args, tuple(value.keywords.values())
        function, args, given = inside = swap(held)
        named = zip(value.keywords, given)
        return value if inside is held else functools.partial(function, *args, **dict(named))
    if id(value) not in seen:
        seen.add(id(value))
        for write, place, held in _places(value):
            if (fresh := swap(held)) is not held:
                undo.append((write, value, place, held))
                write(value, place, fresh)
    return value


def _places(value):
    """List what a value holds: (the function that writes there, the place, what is there now)."""
    if type(value) is dict:
        return [(dict.__setitem__, key, held) for key, held in value.items()]
    if type(value) is list:
        return [(list.__setitem__, i, held) for i, held in enumerate(value)]
    if isinstance(value, types.FunctionType):
        return [(setattr, "__defaults__", value.__defaults__),
                (setattr, "__kwdefaults__", value.__kwdefaults__)]
    if isinstance(value, type) and value.__module__.split(".")[0] in OURS:
        return [(setattr, name, held) for name, held in vars(value).items()]
    return []


def _forget():
    """Empty the caches of our functions: what one has worked out may rest on what is replaced."""
    for module in _modules():
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def _modules():
    """List our modules, as far as they are imported."""
    return [m for name, m in list(sys.modules.items()) if name.split(".")[0] in OURS]


@dataclass
class Outcome:
    """How one trial of a proof ended."""
    checks: list = field(default_factory=list)
    ledger: list = field(default_factory=list)
    error: str = ""

    @property
    def failed(self):
        """What went wrong, first things first; empty if nothing did."""
        wrong = [f"{record.get('name') or record['quantity']}: {record['message']}"
                 for record in self.checks + self.ledger if not record["ok"]]
        return ([self.error] if self.error else []) + wrong

    @property
    def ok(self):
        return not self.failed and bool(self.checks or self.ledger)


def trial(lesson, ranks, out=None, sync=False, hasty=False):
    """Run the lesson's proof on thread ranks of this process and say how it ended.  Rank 0 only

    hasty: only until something is wrong."""
    outcome = Outcome()

    def prove(comm):
        inner = lesson.quietly(comm, out)
        inner.hasty = hasty
        if comm.rank == 0:
            outcome.checks, outcome.ledger = inner.checks, inner.counts
        lesson.script.prove(inner)

    try:
        run_threads(ranks, prove, sync=sync, timeout=TIMEOUT)
    except Enough:
        pass
    except (Exception, SystemExit) as error:               # exit(0) would look like success
        outcome.error = describe(error, lesson.options.mine)
    return outcome


def describe(error, path=None):
    """One error as text; where it came out of the reader's own file, with the line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if path and os.path.abspath(path) == frame.filename]
    if own and isinstance(error, NotImplementedError):
        return f"{path}: {own[-1].name} is not written yet"
    where = f"{path}, line {own[-1].lineno}, in {own[-1].name}: " if own else ""
    asked = f"{error.asked}: " if path and hasattr(error, "asked") else ""
    if isinstance(error, Deadlock):                        # says so itself; all are in one group
        return asked + where + str(error).replace(", group world", "")
    return f"{asked}{where}{type(error).__name__}: {error}"


def demonstrate(lesson, bug, hidden=False):
    """Show a planted bug, its symptoms in the lesson's proof, and the check that notices it."""
    what, _, why = inspect.getdoc(bug).partition("\n\n")
    if not hidden:
        lesson.say(what)
        lesson.source(bug, bug.first)
    failed, passed = lesson.share(lambda: _symptoms(lesson, bug, hidden))
    if failed:
        lesson.say(f"CAUGHT  by {len(failed)} of {len(failed) + passed} checks and counts")
    else:
        lesson.say("NOT CAUGHT: every check passed")
    lesson.broken.append(dict(name=bug.title, ok=bool(failed), by=failed))
    if why and not hidden:
        lesson.say(why)


def _symptoms(lesson, bug, hidden):
    """Run the proof under the bug; with buffered sends first where only others reveal it."""
    ranks = 1 if lesson.script.alone else max(bug.ranks, lesson.comm.size)
    with patched((*bug.replaces, bug)):
        if bug.sync:
            outcome = trial(lesson, ranks)
            lesson.say("small messages, sends are buffered: "
                       + ("every check passes" if outcome.ok else outcome.failed[0]))
            lesson.say("large messages, a send waits for its receiver:")
        outcome = trial(lesson, ranks, lesson.out, sync=bug.sync)
    for line in outcome.error.replace(bug.__name__, "..." if hidden else bug.__name__).splitlines():
        lesson.say(textwrap.fill(line, WIDTH - 2, subsequent_indent="      "))
    failed = outcome.failed
    return failed, len(outcome.checks) + len(outcome.ledger) + bool(outcome.error) - len(failed)


def show(lesson, name):
    """--break NAME | list | mystery"""
    bugs = {bug.title: bug for bug in lesson.script.breaks}
    if name == "list":
        rows = [(title, inspect.getdoc(bug).partition("\n")[0]) for title, bug in bugs.items()]
        return lesson.table(["break", "what is wrong"], rows)
    if name != "mystery":
        return demonstrate(lesson, bugs[name])
    title = lesson.share(lambda: random.choice(list(bugs)))
    lesson.say("Something in the library is broken now. These are the symptoms:\n")
    demonstrate(lesson, bugs[title], hidden=True)
    lesson.say(f"\nWhich one is it: {', '.join(bugs)}?")
    guess = lesson.share(lambda: re.sub("[_ ]", "-", typed(lesson, "your guess: ")))
    lesson.guesses.append(dict(question="which break?", unit="", guess=guess, answer=title,
                               ok=guess == title))
    lesson.say(f"It was {title}: {inspect.getdoc(bugs[title]).partition(chr(10))[0]}")
