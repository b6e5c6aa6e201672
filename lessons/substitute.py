"""Put other functions in a module's place: planted bugs, and a reader's own solutions.

Both are tried in the same way. The lesson's proof runs on thread ranks inside one process, with
synchronous sends if wanted, so that a wrong function ends in a failed check, an exception, or an
exact report of who waits for whom; never in a job that hangs.
"""
import inspect
import os
import random
import sys
import textwrap
import traceback
import types
from contextlib import contextmanager
from dataclasses import dataclass, field

from lessons.script import typed
from lessons.tables import WIDTH, relative
from minidist.ranks.comm import Deadlock, run_threads

OURS = ("minidist", "lessons", "__main__")
TIMEOUT = 30                                         # seconds until a trial counts as endless


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
    """Replace (owner, name, function) wherever the library and the lessons have imported it.

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
    """Every name, table entry and default argument that means `old` now means `new`."""
    for space in _namespaces():
        for key in [key for key, value in space.items() if value is old]:
            undo.append((dict.__setitem__, space, key, old))
            space[key] = new
        for function in [f for f in space.values() if isinstance(f, types.FunctionType)]:
            defaults = function.__defaults__ or ()
            if any(value is old for value in defaults):
                undo.append((setattr, function, "__defaults__", defaults))
                function.__defaults__ = tuple(new if v is old else v for v in defaults)


def _forget():
    """Empty the caches of our functions: what one has worked out may rest on what is replaced."""
    for space in _namespaces():
        for value in list(space.values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def _namespaces():
    """The dictionaries of our modules, and the tables (dictionaries) in them."""
    modules = [m for name, m in list(sys.modules.items()) if name.split(".")[0] in OURS]
    for module in modules:
        yield vars(module)
        yield from (v for k, v in list(vars(module).items())
                    if type(v) is dict and k != "__builtins__")


@dataclass
class Outcome:
    """How one trial of a proof ended."""
    checks: list = field(default_factory=list)
    ledger: list = field(default_factory=list)
    error: str = ""

    @property
    def failed(self):
        """What went wrong, first things first; empty if nothing did."""
        wrong = [f"{c['name']}: difference {relative(c['error'])} (bound {relative(c['bound'])})"
                 for c in self.checks if not c["ok"]]
        wrong += [f"{row['quantity']}: predicted {row['predicted']}, counted {row['measured']}"
                  for row in self.ledger if not row["ok"]]
        return ([self.error] if self.error else []) + wrong

    @property
    def ok(self):
        return not self.failed and bool(self.checks or self.ledger)


def trial(lesson, ranks, out=None, sync=False):
    """Run the lesson's proof on thread ranks of this process and say how it ended.  Rank 0 only"""
    outcome = Outcome()

    def prove(comm):
        inner = lesson.quietly(comm, out)
        if comm.rank == 0:
            outcome.checks, outcome.ledger = inner.checks, inner.counts
        lesson.script.prove(inner)

    try:
        run_threads(ranks, prove, sync=sync, timeout=TIMEOUT)
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
    if isinstance(error, Deadlock):                        # says so itself; all are in one group
        return where + str(error).replace(", group world", "")
    return f"{where}{type(error).__name__}: {error}"


def demonstrate(lesson, bug, hidden=False):
    """Show a planted bug, its symptoms in the lesson's proof, and the check that notices it."""
    what, _, why = inspect.getdoc(bug).partition("\n\n")
    if not hidden:
        lesson.say(what)
        lesson.source(bug, bug.first)
    failed, passed = lesson.share(lambda: _symptoms(lesson, bug))
    if failed:
        lesson.say(f"CAUGHT  by {len(failed)} of {len(failed) + passed} checks and counts")
    else:
        lesson.say("NOT CAUGHT: every check passed")
    lesson.broken.append(dict(name=bug.title, ok=bool(failed), by=failed))
    if why and not hidden:
        lesson.gap()
        lesson.say(why)


def _symptoms(lesson, bug):
    """Run the proof under the bug; with buffered sends first where only others reveal it."""
    ranks = 1 if lesson.script.alone else max(bug.ranks, lesson.comm.size)
    with patched((*bug.replaces, bug)):
        if bug.sync:
            outcome = trial(lesson, ranks)
            lesson.say("small messages, sends are buffered: "
                       + ("every check passes" if outcome.ok else outcome.failed[0]))
            lesson.say("large messages, a send waits for its receiver:")
        outcome = trial(lesson, ranks, lesson.out, sync=bug.sync)
    for line in outcome.error.splitlines():
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
    if lesson.comm.rank == 0:
        typed(lesson, "your guess: ")
    lesson.say(f"It was {title}: {inspect.getdoc(bugs[title]).partition(chr(10))[0]}")
