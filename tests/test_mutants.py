"""Plausible mistakes in the functions that readers write: each must fail in the lesson's proof."""
import subprocess
import sys

import pytest

from tests import mutants

CASES = [(name, *mutant) for name in mutants.lessons() for mutant in mutants.table(name)]
OTHERS = [(name, *change) for name in mutants.lessons() for change in mutants.table(name, "RIGHT")]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("lesson, function, old, new", CASES)
def test_a_mutant_is_caught(lesson, function, old, new):
    assert mutants.caught(lesson, function, old, new)


@pytest.mark.parametrize("lesson, function, old, new", OTHERS)
def test_another_right_solution_passes(lesson, function, old, new):
    assert not mutants.caught(lesson, function, old, new)


def test_every_function_of_every_exercise_has_mutants():
    """In the lesson's own table: tests/mutants/NAME.py."""
    for name, _, _ in mutants.existing():
        functions = [function for function, _, _ in mutants.table(name)]
        for function in mutants.read(name).exercise:
            assert functions.count(function.__name__) >= 1, f"mutants of {name}.{function.__name__}"


def test_the_command_counts_what_is_caught():
    found = subprocess.run([sys.executable, "-m", "tests.mutants", "ulysses"], text=True,
                           stdout=subprocess.PIPE, check=True).stdout
    assert "ulysses          2       12      12  100%" in found and "NOT CAUGHT" not in found
