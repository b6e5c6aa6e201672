"""Batches depend on (seed, step) alone, and every target is the character that follows."""
import itertools
import unicodedata

import numpy as np
import pytest

from minidist import BadInput
from minidist.engine import data
from minidist.engine.data import Batch, Corpus, default_text, random_batch, read_text
from minidist.engine.functional import IGNORE

TEXT = "".join(chr(97 + i * i % 26) for i in range(400))


def test_targets_follow_tokens():
    corpus = Corpus(TEXT, 8)
    batch = corpus.batch(5, seed=0, step=3)
    assert batch.tokens.shape == batch.targets.shape == (5, 8) and batch.count == 40
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    for tokens, targets in zip(batch.tokens, batch.targets):
        assert corpus.decode(tokens) + corpus.decode(targets[-1:]) in TEXT


def test_a_batch_is_a_function_of_seed_and_step():
    """Also of nothing else: the global generator and the batches before it do not matter."""
    corpus, again = Corpus(TEXT, 8), Corpus(TEXT, 8)
    first = [corpus.batch(4, 0, step).tokens for step in range(3)]
    np.random.seed(7)
    np.testing.assert_array_equal(again.batch(4, 0, 2).tokens, first[2])
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(again.batch(4, 1, 0).tokens, first[0])


def test_validation_text_is_never_trained_on():
    """Every tenth of the text gives its end, and no window reaches across the border."""
    parts = [chr(65 + i) * 180 + chr(97 + i) * 20 for i in range(10)]
    corpus = Corpus("".join(parts), 8)
    seen = {}
    for split in ("train", "val"):
        batches = [corpus.batch(99, 0, step, split) for step in range(20)]
        ids = [np.r_[b.tokens.ravel(), b.targets.ravel()] for b in batches]
        seen[split] = set(corpus.decode(np.unique(ids)))
    assert seen == {"train": set("ABCDEFGHIJ"), "val": set("abcdefghij")}
    assert corpus.batch(5, 0, 0, "val").step is None and corpus.batch(5, 0, 7).step == 7


def test_every_window_can_be_drawn():
    """The first and the last one too: 400 characters are two parts, of which 20 are held out."""
    corpus = Corpus("".join(map(chr, range(1000, 1400))), 8)
    drawn = {t[0] for s in range(60) for t in corpus.batch(50, 0, s).tokens}
    assert drawn == {*range(0, 172), *range(200, 372)}
    drawn = {t[0] for s in range(9) for t in corpus.batch(50, 0, s, "val").tokens}
    assert drawn == {*range(180, 192), *range(380, 392)}


def test_shortest_text():
    corpus = Corpus("abc" * 6, 8)
    assert corpus.starts["train"] == [0] and corpus.starts["val"] == [9]
    assert corpus.batch(3, 0, 0).tokens.shape == corpus.batch(3, 0, 0, "val").tokens.shape == (3, 8)
    with pytest.raises(BadInput, match="17 characters.*context of 8.*18"):
        Corpus("abc" * 5 + "ab", 8)


def test_default_text_is_the_same_on_every_python():
    """Its parts are held here, its whole by a hash that refuses any other."""
    text = default_text()
    names = text.split("\n")
    assert (len(text), len(names), len(set(names)), len(set(text))) == (350_041, 12_674, 12_674, 39)
    assert all(unicodedata.name(unicodedata.lookup(name)).lower() == name for name in names[::99])
    assert names[0] == "latin small letter k with caron" and names[1] == "yi syllable jyr"


def test_another_default_text_is_refused(monkeypatch):
    """As on a Python whose unicodedata has lost or gained a name."""
    class Other:
        def name(self, c, default):
            return "letter z" if c == "a" else default
    monkeypatch.setattr(data, "ucd_3_2_0", Other())
    with pytest.raises(BadInput, match="does not hold the names of Unicode 3.2.*--text FILE"):
        default_text()


def test_read_text(tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes("\ufeffnaïve".encode("utf-8"))         # a byte order mark is not a character
    assert read_text(good) == "naïve"
    bad.write_bytes(b"abc\xe9def")
    with pytest.raises(BadInput, match="not UTF-8 text: byte 3 is 0xe9"):
        read_text(bad)
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BadInput, match="cannot read"):
            read_text(path)


def test_pieces_know_where_they_stand():
    batch = random_batch(13, 8, 5, seed=0, step=2)
    rows = batch.take_rows(np.array([3, 1]))
    np.testing.assert_array_equal(rows.tokens, batch.tokens[[3, 1]])
    assert list(rows.rows) == [3, 1] and rows.step == 2
    zigzag = np.array([0, 1, 6, 7])
    tokens = rows.take_tokens(zigzag)
    np.testing.assert_array_equal(tokens.targets, batch.targets[[3, 1]][:, zigzag])
    assert list(tokens.positions) == list(tokens.stream) == [0, 1, 6, 7]
    stream = tokens.take_stream(1, 2)
    assert list(stream.stream) == [6, 7] and stream.tokens.shape == (2, 4)
    unlabelled = Batch.of(batch.tokens).take_rows([0]).take_tokens([1])
    assert unlabelled.targets is None


def test_what_is_taken_first_does_not_matter():
    """Rows, tokens and the stream, which is cut twice, in every order."""
    tokens = np.array([1, 3, 4, 5, 8, 9, 10, 11])
    takes = {"rows": lambda b: b.take_rows([2, 0]), "tokens": lambda b: b.take_tokens(tokens),
             "half": lambda b: b.take_stream(1, 2), "quarter": lambda b: b.take_stream(0, 2)}
    for order in itertools.permutations(takes):
        if order.index("half") < order.index("quarter"):
            batch = random_batch(13, 12, 3, seed=0, step=2)
            for name in order:
                batch = takes[name](batch)
            assert list(batch.stream) == [8, 9] and list(batch.positions) == list(tokens)
            assert batch.tokens.shape == batch.targets.shape == (2, 8)
            assert list(batch.rows) == [2, 0]


def test_a_stream_that_does_not_split():
    with pytest.raises(BadInput, match="6 tokens .* do not split into 4 equal runs"):
        _ = random_batch(13, 12, 3, 0, 0).take_stream(1, 4).take_tokens(np.arange(6)).stream


def test_what_is_not_there_is_not_counted_or_spelled():
    with pytest.raises(ValueError, match="without targets"):
        _ = Batch.of(np.zeros((1, 2), int)).count
    corpus = Corpus(TEXT, 8)
    with pytest.raises(BadInput, match=f"'é' does not occur.* {corpus.vocab} others"):
        corpus.encode("aé")
    for wrong in (-1, corpus.vocab):
        with pytest.raises(IndexError, match=f"id {wrong} .*there are {corpus.vocab}"):
            corpus.decode([0, wrong])


def test_micro_batches_cover_the_batch_once():
    batch = random_batch(13, 8, 5, seed=0, step=0)
    for parts in (1, 2, 3, 7):
        micro = batch.split(parts)
        assert len(micro) == parts and sum(b.count for b in micro) == batch.count
        np.testing.assert_array_equal(np.concatenate([b.rows for b in micro]), np.arange(5))


def test_random_batch_is_ragged():
    batch = random_batch(13, 64, 6, seed=0, step=0)
    counts = [batch.take_rows([i]).count for i in range(6)]
    assert len(set(counts)) > 3 and batch.count < 6 * 64
    assert random_batch(13, 64, 6, 0, 0, ragged=False).count == 6 * 64
    np.testing.assert_array_equal(random_batch(13, 64, 6, 0, 0).tokens, batch.tokens)
    assert (batch.targets == IGNORE).sum() == 6 * 64 - batch.count
