"""Every two techniques: together in a training that is one process's, or refused with a reason."""
from itertools import combinations

import pytest

from minidist import fuzz, pairs, sweep
from tests.readme import README

REFUSED = [two for two in combinations(sweep.TECHNIQUES, 2) if pairs.refused(*two)]
COVERING = sweep.covering()


@pytest.mark.parametrize("number", range(len(COVERING)), ids=lambda i: "+".join(COVERING[i]))
def test_a_covering_set_of_combinations_is_equal_to_one_process(number):
    outcome = sweep.train(sweep.joined(*COVERING[number]), ["adamw", "sgd"][number % 2], steps=2)
    assert outcome.kind == fuzz.EQUIVALENT, outcome.line()


def test_every_two_techniques_are_in_it_or_refused_or_forms_of_one():
    together = {two for names in COVERING for two in combinations(names, 2)}
    for two in combinations(sweep.TECHNIQUES, 2):
        assert (two in together) == (sweep.expected(*two) == "="), two
        assert (two in REFUSED) == (sweep.expected(*two) not in "=."), two


@pytest.mark.parametrize("two", REFUSED, ids="+".join)
def test_a_pair_of_the_table_is_refused_with_its_reason(two):
    outcome = sweep.train(sweep.joined(*two))
    assert outcome.kind == fuzz.REFUSED, outcome.line()
    assert pairs.refused(*two).reason.split("{")[0] in outcome.words
    assert sweep.cell(*two)[0] == sweep.expected(*two)


def test_what_three_cannot_do_is_refused():
    found = sweep.joined("ep", "zero 3", "offload")
    assert sweep.train(found).kind == fuzz.REFUSED
    assert not sweep.goes(["ep", "zero 3", "offload"])


def test_the_readme_shows_the_matrix():
    assert "```\n" + "\n".join(sweep.matrix(sweep.expected)) + "\n```" in README.read_text()


def test_a_difference_shows_in_the_matrix(monkeypatch):
    from minidist import buckets
    monkeypatch.setattr(buckets, "all_reduce", lambda x, comm, **options: x)
    assert sweep.cell("dp", "tiled")[0] == "!" and sweep.expected("dp", "tiled") == "="
