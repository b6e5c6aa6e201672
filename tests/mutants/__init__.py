"""Plausible mistakes in the functions that readers write: the lesson's proof must notice each.

    python -m tests.mutants             how many of each lesson's are caught, what is right passes
    python -m tests.mutants ring        each of one lesson's, and what catches it

A table per lesson, in the file of its name: {function: [(text of its source, what is there
instead), ...]}; below it RIGHT, other right solutions in the same form, which must pass.
"""
import inspect
import io
import textwrap
from importlib import import_module
from importlib.util import find_spec
from itertools import zip_longest

import numpy as np

from lessons import kit, script, substitute
from minidist.ranks.comm import run_threads

SIZES = 2, 3, 4, 1                     # on one rank many mutants are right, on two many more


def table(lesson, kind="MUTANTS", function=None):
    """The mutants of a lesson's functions, or of one, or other right solutions.

    -> [(function, old, new)]"""
    name = f"tests.mutants.{lesson}"
    found = getattr(import_module(name), kind, {}) if find_spec(name) else {}
    return [(each, *change) for each, changes in found.items() for change in changes
            if function in (None, each)]


def lessons():
    """The lessons that have a table, in reading order."""
    return [name for name in script.names() if table(name)]


def right(lesson):
    """Other right solutions, one of each function in a row.  -> [[(function, old, new)]]"""
    by_function = {}
    for change in table(lesson, "RIGHT"):
        by_function.setdefault(change[0], []).append(change)
    return [[each for each in row if each] for row in zip_longest(*by_function.values())]


def read(lesson):
    return script.read(import_module(f"lessons.{lesson}").SCREENS)


def caught(lesson, *changes, sizes=SIZES):
    """Let changed functions take the library's place.  -> what the lesson's proof says of it

    changes: (function, old, new). The proof runs as --mine runs it, but ends at the first thing
    that is wrong: "" if nothing is on any of these numbers of ranks"""
    plan = read(lesson)
    exercise = {f.__name__: f for f in plan.exercise}
    replaced = [(inspect.getmodule(exercise[name]), name, changed(exercise[name], old, new))
                for name, old, new in changes]
    with substitute.patched(*replaced):
        for ranks in [1] if plan.alone else sizes:
            if found := proof(plan, ranks).failed:
                return f"{ranks} ranks: {found[0]}"
    return ""


def changed(function, old, new):
    """Make a function of its source with another text in one's place; np is there, as in a stub."""
    made = {**vars(inspect.getmodule(function)), "np": np}
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{function.__name__} does not say {old!r} any more"
    exec(compile(source.replace(old, new), "a mutant", "exec"), made)
    return made[function.__name__]


def proof(plan, ranks):
    """Run a lesson's proof on thread ranks until something is wrong.  -> Outcome"""
    options = script.parse(plan, ["--no-figure"])
    return run_threads(1, lambda comm: substitute.trial(
        kit.Lesson(comm, plan, options, io.StringIO()), ranks, sync=True, hasty=True))[0]
