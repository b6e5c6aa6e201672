"""Plausible mistakes in the functions that readers write: each must fail in the lesson's proof.

Every third of each function's is tried here, and what is right on one rank and on three; `python
-m tests.mutants` tries all on 1 to 4, and .ci/run too.
"""
import subprocess
import sys

import pytest

from lessons import script
from tests import mutants

CASES = [(name, *mutant) for name in mutants.lessons() for function in mutants.read(name).exercise
         for mutant in mutants.table(name, function=function.__name__)[::3]]
OTHERS = [(name, row) for name in mutants.lessons() for row in mutants.right(name)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("lesson, function, old, new", CASES)
def test_a_mutant_is_caught(lesson, function, old, new):
    assert mutants.caught(lesson, (function, old, new))


@pytest.mark.parametrize("lesson, changes", OTHERS)
def test_other_right_solutions_pass(lesson, changes):
    """Those of all functions together: each must."""
    assert not mutants.caught(lesson, *changes, sizes=(3, 1))


def test_every_function_of_every_exercise_has_mutants():
    """In the lesson's own table, tests/mutants/NAME.py: six at least."""
    for name in script.names():
        functions = [function for function, _, _ in mutants.table(name)]
        for function in mutants.read(name).exercise:
            assert functions.count(function.__name__) >= 6, f"mutants of {name}.{function.__name__}"


def test_the_command_counts_what_is_caught():
    found = subprocess.run([sys.executable, "-m", "tests.mutants", "ulysses"], text=True,
                           stdout=subprocess.PIPE, check=True).stdout
    assert "ulysses          2       12      12  100%" in found and "NOT CAUGHT" not in found
