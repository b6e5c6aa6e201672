"""The bug zoo: enough bugs, where they were seen, and a mystery that its tools find."""
import inspect
import re
import subprocess
import sys

import pytest

from lessons import caught, script, zoo
from lessons.reports import REPORTS
from minidist.ranks import launch
from tests.mpi import need_mpi

BUGS = zoo.bugs()


def test_forty_bugs_and_twenty_five_from_public_reports():
    """Each is recorded once, each report is project#number, none is of a bug that is gone."""
    names = [bug.name for bug in BUGS]
    assert len(names) == len(set(names)) >= 40
    assert list(caught.CAUGHT) == names
    reported = [bug for bug in BUGS if bug.report]
    assert len(reported) >= 25 and {bug.name for bug in reported} == REPORTS.keys()
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report) for report in REPORTS.values())


def test_lessons_that_name_a_report_name_the_same():
    for bug in BUGS:
        text = f"{bug.what} {bug.why}"
        for number in re.findall(r"(?:Megatron-LM|OLMo-core|Automodel|TrenTorch) #(\d+)", text):
            assert f"#{number}" in bug.report or bug.name in ("sp.sliced", "checkpoint.interleaved")


def test_a_plant_takes_what_the_function_takes():
    """No bug is caught because it cannot be called."""
    for bug in BUGS:
        right = inspect.signature(bug.plant.original)
        needed = [p.name for p in right.parameters.values() if p.default is p.empty]
        try:
            inspect.signature(bug.plant).bind(*needed)
        except TypeError as error:
            pytest.fail(f"{bug.name}: {error}; the function takes {right}")


@pytest.mark.parametrize("by, large, symptom", [
    (["deadlock: no rank can go on"], False, ("hang", "who waits for whom")),
    (["deadlock: no rank can go on"], True, ("large", "who waits for whom")),
    (["ValueError: 3"], False, ("stops", "ValueError")),
    (["sum: difference 1", "same: DIVERGED at step 0: w, 1"], False, ("at once", "same")),
    (["a: DIVERGED at step 2: w", "b: DIVERGED at step 1: w"], False, ("later", "a")),
    (["bytes: predicted 2, counted 3"], False, ("bill", "bytes")),
    (["bytes: predicted 2, counted 3", "sum: difference 1"], False, ("values", "sum")),
    (["f, asked alone: asked for 3"], False, ("corner", "f, asked alone"))])
def test_symptoms(by, large, symptom):
    assert zoo.classify(by, large) == symptom


def run(*argv):
    return subprocess.run([sys.executable, "-m", "lessons.zoo", *argv], text=True,
                          capture_output=True)


def test_the_list():
    """Every bug with its check, under its symptom."""
    done = run()
    assert done.returncode == 0 and f"{len(BUGS)} planted bugs, {len(REPORTS)} of" in done.stdout
    for bug in BUGS:
        assert f"  {bug.name}: " in done.stdout and f"caught by: {bug.check}" in done.stdout
    assert done.stdout.count("caught by: ") == len(BUGS)
    assert done.stdout.count("seen in: ") == len(REPORTS)
    assert max(map(len, done.stdout.splitlines())) <= 130
    few = run("--lesson", "tp", "--symptom", "later").stdout
    assert few.count("caught by") == 1 and "tp.bias" in few


def test_a_mystery_is_the_same_for_the_same_seed():
    """Hints and the answer are about what is planted, and every bug that spoils a training is."""
    some = zoo.pool()
    assert {zoo.planted(seed).name for seed in range(len(some))} == {bug.name for bug in some}
    assert len(some) >= 30 and all(bug.lesson in script.names() for bug in some)
    bug = zoo.planted(7)
    said = [run("--mystery", "7", "--hint", str(n)).stdout for n in (1, 2, 3)]
    assert f"lessons.{bug.lesson}" in said[0] and bug.check in said[1]
    assert bug.plant.replaces[1] in said[2] and not any(bug.title in text for text in said)
    assert run("--mystery", "7", "--answer").stdout.startswith(bug.name)


@pytest.mark.parametrize("name", ["tp.bias", "zero.local-norm", "pp.scaled"])
def test_a_mystery_is_found_by_verify(name):
    """The run says nothing of its bug and ends well; with --verify it does not."""
    need_mpi()
    bug, = [bug for bug in BUGS if bug.name == name]
    seed = next(seed for seed in range(999) if zoo.planted(seed) == bug)
    ranks = bug.training.split()[1]
    for more, status in ([], 0), (["--verify"], 1):
        argv = [sys.executable, "-m", "lessons.zoo", "--mystery", str(seed), *more]
        done = subprocess.run(launch.command(int(ranks), argv), text=True, capture_output=True)
        assert done.returncode == status, done.stdout + done.stderr
        assert bug.title not in done.stdout
        assert ("DIVERGED" in done.stdout) == bool(more)


@pytest.mark.parametrize("argv, words", [
    (["--lesson", "rings"], "invalid choice"), (["--symptom", "odd"], "invalid choice"),
    (["--hint", "1"], "add --mystery"), (["--mystery", "-3"], "--mystery"),
    (["--mystery", "1", "--hint", "4"], "--hint")])
def test_what_cannot_be_is_one_sentence(argv, words):
    done = run(*argv)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
