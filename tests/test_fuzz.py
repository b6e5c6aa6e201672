"""Random layouts: each one is equal to one process, or refused before its first step."""
import functools
import itertools
import subprocess
import sys

import pytest

from minidist import BadInput, buckets, fuzz, parallel, sweep, train
from minidist.ranks import environment

CASES = 24


@pytest.mark.parametrize("start", range(0, CASES, 8))
def test_a_few_dozen_cases(start):
    outcomes = [fuzz.run(seed) for seed in range(start, start + 8)]
    bad = [outcome.line() for outcome in outcomes if not outcome.good]
    assert not bad, "\n".join(bad)
    assert sum(outcome.kind == fuzz.EQUIVALENT for outcome in outcomes) >= 5


def test_every_value_of_the_table_is_drawn():
    cases = [fuzz.choose(seed) for seed in range(600)]
    for choice in [*fuzz.OTHERS, *fuzz.FLAGS]:
        if not callable(choice.values):
            assert set(choice.values) <= {case[choice.name] for case in cases}, choice.name
    meshes = {tuple(case[axis] for axis in fuzz.AXES) for case in cases}
    assert meshes == set(fuzz.meshes())


def test_every_flag_of_a_layout_is_in_the_table_or_left_out_on_purpose():
    """A new flag of minidist.train that changes how it computes must join, with one line."""
    known = {choice.name for choice in fuzz.FLAGS} | set(fuzz.AXES) | set(fuzz.LEFT_OUT)
    offered = {word[2:] for action in train.parser()._actions for word in action.option_strings
               if word.startswith("--")}
    assert offered - known == set() and known - offered == set()


def test_a_seed_is_a_case_and_a_new_line_changes_no_other_choice(monkeypatch):
    before = [fuzz.choose(seed) for seed in range(20)]
    monkeypatch.setattr(fuzz, "FLAGS", [fuzz.Choice("new", (1, 2)), *fuzz.FLAGS])
    after = [fuzz.choose(seed) for seed in range(20)]
    assert before == [{k: v for k, v in case.items() if k != "new"} for case in after]
    assert len({str(case) for case in before}) == 20


@functools.cache
def seed_of(dp, **wanted):
    """Find the first case of so many replicas, nothing else spread, and with these choices."""
    return next(seed for seed in itertools.count() if fuzz.MESH.draw(seed, {}) == (dp, 1, 1, 1)
                and wanted.items() <= fuzz.choose(seed).items())


ALONE = dict(dp=2, zero=None, optimizer="sgd")


def test_a_missing_sum_is_found(monkeypatch):
    seed = seed_of(**ALONE)
    assert fuzz.run(seed).kind == fuzz.EQUIVALENT
    monkeypatch.setattr(buckets, "all_reduce", lambda x, comm, **options: x)
    outcome = fuzz.run(seed)
    assert outcome.kind == "DIVERGED" and not outcome.good
    assert f"--seed {seed}     # DIVERGED" in fuzz.summary([outcome])[1]


@pytest.mark.parametrize("kind, words", [("CRASHED", "CRASHED  KeyError: 'x'"),
                                         ("REFUSED LATE", "REFUSED LATE  no"),
                                         ("RANKS DIFFER", "RANKS DIFFER"),
                                         ("CRASHED", "CRASHED  Deadlock: deadlock")])
def test_what_should_not_be_is_told_apart(monkeypatch, kind, words):
    step, spread = fuzz.train_step, parallel.spread

    def bad_step(model, batch, optimizer, mesh, *args):
        if kind == "REFUSED LATE":
            raise BadInput("no")
        if "KeyError" in words:
            {}["x"]
        if "Deadlock" in words and mesh.world.rank == 0:
            mesh.world.recv(fuzz.np.zeros(1), 1)
        return step(model, batch, optimizer, mesh, *args)

    def bad_spread(model, mesh, *args, **options):
        if kind == "RANKS DIFFER":
            raise BadInput(f"rank {mesh.world.rank}")
        return spread(model, mesh, *args, **options)

    monkeypatch.setattr(fuzz, "train_step", bad_step)
    monkeypatch.setattr(parallel, "spread", bad_spread)
    outcome = fuzz.run(seed_of(**ALONE))
    assert outcome.kind == kind and outcome.words.startswith(words) and not outcome.good


def test_the_command(monkeypatch):
    seed = seed_of(dp=1)
    argv = [sys.executable, "-m", "minidist.verify", "--fuzz", "1", "--seed", str(seed)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith(fuzz.run(seed).line()), done.stderr
    assert "\n1 cases: 1 " in done.stdout
    monkeypatch.setattr(environment, "launched", lambda: True)
    monkeypatch.setattr(sys, "argv", argv[2:])
    with pytest.raises(BadInput, match="leave out -n and mpirun"):
        sweep.main()
