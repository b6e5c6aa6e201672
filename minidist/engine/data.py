"""Text to batches: the characters of a text, cut into windows of one context each.

    "to be or not"   tokens   t o _ b e _ o r        a target is the character that follows;
                     targets  o _ b e _ o r _        IGNORE marks one that does not count

A batch is a function of (seed, step) alone: every rank makes the same one and takes its piece, and
a run that starts at step 100 sees what a run from 0 would have seen.

Lesson: python -m lessons.step
"""
import functools
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from unicodedata import ucd_3_2_0

import numpy as np

from minidist import BadInput
from minidist.engine.functional import IGNORE

DEFAULT_SHA256 = "ebd08a57f815dc9c1beb08e159a53a0bb55e62d71ff6803478a9dd3cdb2d5e3e"


@dataclass(frozen=True, eq=False)
class Batch:
    """Hold tokens and where they stand in the global batch, whatever piece of it this is.

    positions serve attention, stream serves the residual stream: the same places, or one of equal
    runs of them where the stream is cut and attention is not. Cuts are kept as (which run, of how
    many), so that it does not matter what is taken first, a piece of the stream or of the tokens.
    step keys the dropout masks; None drops nothing.
    """
    tokens: np.ndarray                      # [B, T] ids
    targets: np.ndarray | None              # [B, T] ids or IGNORE; None: no loss is asked for
    rows: np.ndarray                        # [B] which rows of the global batch
    positions: np.ndarray                   # [T] which places of the sequence
    step: int | None
    cuts: tuple = ()                        # of the stream: (run, runs), one inside the other
    narrowed: bool = False                  # is it the piece of a model's rank already?

    @classmethod
    def of(cls, tokens, targets=None, step=None):
        """Make a whole batch: all its rows, all its positions."""
        rows, length = tokens.shape
        return cls(tokens, targets, np.arange(rows), np.arange(length), step)

    def take_rows(self, i):
        """Keep rows i."""
        targets = None if self.targets is None else self.targets[i]
        return replace(self, tokens=self.tokens[i], targets=targets, rows=self.rows[i])

    def take_tokens(self, i):
        """Keep the tokens at places i of every row."""
        targets = None if self.targets is None else self.targets[:, i]
        return replace(self, tokens=self.tokens[:, i], targets=targets, positions=self.positions[i])

    def take_stream(self, run, runs):
        """Keep one of so many equal runs of the residual stream, and all tokens."""
        return replace(self, cuts=(*self.cuts, (run, runs)))

    @functools.cached_property
    def stream(self):
        """Positions of the residual stream.  [t]"""
        stream = self.positions
        for run, runs in self.cuts:
            if len(stream) % runs:
                raise BadInput(f"{len(stream)} tokens of the residual stream do not split into "
                               f"{runs} equal runs")
            stream = np.split(stream, runs)[run]
        return stream

    def split(self, parts):
        """Cut into micro-batches by rows; with more parts than rows, some are empty."""
        return [self.take_rows(i) for i in np.array_split(np.arange(len(self.rows)), parts)]

    @property
    def count(self):
        """Number of targets that count."""
        if self.targets is None:
            raise ValueError("a batch without targets has no count: nothing in it is a loss")
        return int(np.count_nonzero(self.targets != IGNORE))


class Alphabet:
    """Characters, numbered in their order."""

    def __init__(self, characters):
        self.characters = sorted(characters)
        self.ids = {c: i for i, c in enumerate(self.characters)}

    @property
    def vocab(self):
        return len(self.characters)

    def encode(self, text):
        """Turn characters into ids.  Raises BadInput for one that the text does not have."""
        try:
            return [self.ids[c] for c in text]
        except KeyError as error:
            raise BadInput(f"the character {error.args[0]!r} does not occur in the text that the "
                           f"model learns from; it has {self.vocab} others") from None

    def decode(self, tokens):
        """Turn ids into characters."""
        tokens = list(tokens)
        wrong = [t for t in tokens if not 0 <= t < self.vocab]
        if wrong:
            raise IndexError(f"id {wrong[0]} is no character: there are {self.vocab}, from 0 on")
        return "".join(self.characters[t] for t in tokens)


class Corpus(Alphabet):
    """A text as numbers, one per character; the end of every tenth of it is kept for validation."""

    def __init__(self, text, context):
        window = context + 1                                   # one more: the last target
        if len(text) < 2 * window:
            raise BadInput(f"the text has {len(text)} characters; with a context of {context} it "
                           f"needs at least {2 * window}: {window} to train on and as many to "
                           f"validate")
        super().__init__(set(text))
        self.context = context
        self.tokens = np.array(self.encode(text))
        held = np.concatenate([[0], np.cumsum(held_out(len(text), window))])
        held = held[window:] - held[:-window]                  # in the window that starts here
        self.starts = {"train": np.flatnonzero(held == 0), "val": np.flatnonzero(held == window)}

    @property
    def sha256(self):
        """Say which text this is."""
        return hashlib.sha256("".join(self.characters).encode() + self.tokens.tobytes()).hexdigest()

    def batch(self, size, seed, step, split="train"):
        """Draw `size` windows from (seed, step).  A validation batch has no step: no dropout."""
        starts = np.random.default_rng([seed, step]).choice(self.starts[split], size)
        windows = self.tokens[starts[:, None] + np.arange(self.context + 1)]
        return Batch.of(windows[:, :-1], windows[:, 1:], step if split == "train" else None)


def held_out(length, window):
    """Mark what is kept for validation: the last tenth of each of ten parts, or of one if short.

    Not simply the end of the text, which may be easier than the rest, or harder.
    """
    mark = np.zeros(length, bool)
    for part in np.array_split(mark, min(10, max(1, length // (20 * window)))):
        part[-max(len(part) // 10, window):] = True
    return mark


def default_text():
    """List the names of all characters of Unicode 3.2, in the order of their hashes.

    English words that people chose, learned fast, and the same on every Python: Unicode promises
    that a name never changes, and Python keeps version 3.2 for good, since domain names rest on it.
    Chinese and Korean names are left out: numbers and syllables, thousands of them.
    """
    names = (ucd_3_2_0.name(chr(i), "").lower() for i in range(0x20000))
    kept = [name for name in names if name and not name.startswith(("cjk", "hangul syllable"))]
    text = "\n".join(sorted(kept, key=lambda name: hashlib.sha256(name.encode()).digest()))
    if hashlib.sha256(text.encode()).hexdigest() != DEFAULT_SHA256:
        raise BadInput("this Python's unicodedata does not hold the names of Unicode 3.2, on which "
                       "runs without --text are compared; name a text of your own with --text FILE")
    return text


def read_text(path):
    """Read a text file, which must be UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text: byte {error.start} is "
                       f"0x{error.object[error.start]:02x}; convert it to UTF-8 first") from None


def random_batch(vocab, context, rows, seed, step, ragged=True):
    """Draw random tokens; ragged: with targets to ignore, a different number in each row."""
    rng = np.random.default_rng([seed, step])
    tokens, targets = rng.integers(0, vocab, (2, rows, context))
    if ragged:
        share = np.linspace(0.1, 0.6, rows)[:, None]
        targets[rng.random((rows, context)) < share] = IGNORE
    return Batch.of(tokens, targets, step)
