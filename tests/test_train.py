"""The training step in pieces, and the command: repeatable, plain about mistakes, whole files."""
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from minidist import BadInput, train
from minidist.engine.data import Batch, random_batch
from minidist.engine.functional import IGNORE
from minidist.engine.nn import Module, Parameter
from minidist.engine.optim import SGD, AdamW
from minidist.engine.tensor import Tensor
from minidist.step import train_step
from tests.models import perturb, tiny


class Line(Module):
    """A model whose loss per token is w times the token."""

    def __init__(self):
        self.w = Parameter(np.zeros(()), "w")

    def localize(self, batch):
        return batch

    def forward(self, batch):
        return (self.w * Tensor(np.where(batch.targets == IGNORE, 0.0, batch.tokens))).sum()


def line_batch(*rows):
    """Rows of numbers, filled up to the longest with targets to ignore."""
    tokens, targets = np.zeros((2, len(rows), 3), int)
    targets += IGNORE
    for i, row in enumerate(rows):
        tokens[i, :len(row)], targets[i, :len(row)] = row, 1
    return Batch.of(tokens, targets, step=0)


@pytest.mark.parametrize("rows", [([1, 2, 3], [7]), ([1, 2, 3], [7], [])],
                         ids=["two", "and-one-without-targets"])
def test_a_token_weighs_the_same_in_every_micro_batch(rows):
    """Means of 1, 2, 3 and of 7 average to 4.5; the mean of all four tokens is 3.25."""
    for pieces in (1, 2, 3, 5):
        model = Line()
        result = train_step(model, line_batch(*rows), SGD(model.parameters(), lr=1.0),
                            num_microbatches=pieces)
        assert model.w.data == -3.25 and result.count == 4 and abs(result.norm - 3.25) < 1e-15


@pytest.mark.parametrize("make", [lambda ps: SGD(ps, 0.1, momentum=0.9),
                                  lambda ps: AdamW(ps, 0.01, eps=1e-5)], ids=["sgd", "adamw"])
def test_accumulation_equals_one_big_batch(make):
    """Over unequal numbers of tokens, with dropout and clipping, even in more pieces than rows."""
    def trained(pieces):
        model = perturb(tiny(dropout=0.2))
        optimizer = make(model.parameters())
        steps = [train_step(model, random_batch(13, 8, 5, seed=3, step=step), optimizer,
                            num_microbatches=pieces, max_norm=0.5) for step in range(3)]
        return [s.loss for s in steps] + [s.norm for s in steps], model.parameters()
    reports, params = trained(1)
    for pieces in (2, 3, 5, 7):
        others, others_params = trained(pieces)
        np.testing.assert_allclose(others, reports, rtol=1e-12)
        for p, q in zip(params, others_params):
            assert np.abs(p.data - q.data).max() <= 1e-12 * np.abs(p.data).max(), p.name


def test_a_batch_without_targets_changes_nothing():
    model = perturb(tiny())
    optimizer = AdamW(model.parameters(), 0.1)
    before = [p.data.copy() for p in model.parameters()]
    batch = random_batch(13, 8, 3, seed=0, step=0)
    batch = replace(batch, targets=np.full_like(batch.targets, IGNORE))
    result = train_step(model, batch, optimizer)
    assert (result.loss, result.count, optimizer.t) == (0.0, 0, 0)
    assert all(np.array_equal(a, p.data) for a, p in zip(before, model.parameters()))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_step_keeps_the_dtype(dtype):
    model = tiny(dtype, dropout=0.1)
    optimizer = AdamW(model.parameters(), lambda t: np.float64(0.01))
    train_step(model, random_batch(13, 8, 3, seed=0, step=0), optimizer, max_norm=0.1)
    arrays = [x for p in model.parameters() for x in (p.data, p.grad, *optimizer.state[p.name])]
    assert {x.dtype for x in arrays} == {np.dtype(dtype)}


# ---------------------------------------------------------------- the command

@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Run the command in this process on a model of one small layer.  -> its JSON and its output"""
    monkeypatch.chdir(tmp_path)

    def run(*argv, steps=3):
        small = ["--preset", "lesson", "--layers", "1", "--batch", "4", "--sample", "20"]
        always = [*small, "--steps", str(steps), "--json", "t.json"]
        monkeypatch.setattr(sys, "argv", ["train", *always, *argv])
        train.main()
        return json.loads((tmp_path / "t.json").read_text()), capsys.readouterr().out
    return run


def test_the_same_command_gives_the_same_parameters(command):
    flags = ["--no-figure", "--dropout", "0.1"]
    first, again, other = command(*flags), command(*flags), command(*flags, "--seed", "1")
    for key in ("parameters_sha256", "losses", "val_losses", "sample"):
        assert first[0][key] == again[0][key] and first[0][key] != other[0][key]


def test_json_and_picture(command, tmp_path):
    data, out = command("--out", "deep/out", steps=20)
    assert len(data["losses"]) == 20 and data["tokens_per_s"] > 0 and data["verdict"] is None
    assert data["val_steps"] == list(range(0, 21, 2)) and len(data["val_losses"]) == 11
    assert data["losses"][-1] < data["losses"][0] - 0.5 and len(data["sample"]) == 20
    assert (tmp_path / "deep/out/loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["deep", "loss.png", "out", "t.json"]
    assert "step     20/20   loss" in out and data["sample"] in out and "0:00 left" in out
    assert out.count("tokens/s") == 10 and "\r" not in out
    assert data["parameters_sha256"] in out


def test_steps_fewer_than_validations(command):
    data, _ = command("--no-figure", steps=1)
    assert data["val_steps"] == [0, 1]


def test_accumulation_is_the_same_training(command):
    flags = ["--no-figure", "--dtype", "float64", "--optimizer", "sgd"]
    one, three = command(*flags)[0], command(*flags, "--grad-accum", "3")[0]
    np.testing.assert_allclose(three["losses"], one["losses"], rtol=1e-12)
    assert one["losses"] != command("--no-figure", "--dtype", "float64")[0]["losses"]


def test_reads_a_text(command, tmp_path):
    (tmp_path / "text").write_text("to be or not to be " * 20, encoding="utf-8")
    data, out = command("--no-figure", "--text", "text", "--context", "8")
    assert "380 characters, 7 different" in out and set(data["sample"]) <= set("to be rn")


@pytest.mark.parametrize("argv, words", [
    (["--preset", "huge"], "no preset 'huge'; use one of lesson, nano, mini"),
    (["--heads", "5"], "5 heads do not divide a width of 48"),
    (["--kv-heads", "5"], "5 key/value heads do not divide 12 heads"),
    (["--steps", "-5"], "--steps: -5 is out of range, use 1 or more"),
    (["--seed", "-1"], "--seed: -1"), (["--lr", "nan"], "--lr: nan"),
    (["--dropout", "1"], "dropout = 1.0"), (["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
    (["--grad-accum", "5"], "4 sequences do not fill 5 pieces"),
    (["--text", "latin1"], "not UTF-8 text: byte 3 is 0xe9"),
    (["--text", "short"], "the text has 33 characters; with a context of 16 it needs at least 34"),
    (["--text", "missing"], "cannot read missing: No such file"),
    (["--out", "short"], "cannot write short/loss.png"), (["--json", "."], "is a directory"),
    (["--batch", "99999999999"], "a batch of 99999999999 take over"),
    (["--width", "600000"], "a model of width 600000 .* use a smaller --width"),
    (["--width", "2000000"], "--width: 2000000 is out of range, use 1000000 or less"),
    (["--json", "short", "--text", "short"], "cannot be written without loss of short"),
    (["--out", "x", "--json", "x"], "x and x/loss.png cannot both be written"),
])
def test_bad_input_is_one_sentence_and_leaves_nothing(command, tmp_path, argv, words):
    (tmp_path / "latin1").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "short").write_bytes(b"x" * 33)
    with pytest.raises(BadInput, match=words) as error:
        command(*argv)
    assert "\n" not in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latin1", "short"]


def test_bad_input_ends_the_command_with_status_2(tmp_path):
    done = subprocess.run([sys.executable, "-m", "minidist.train", "--heads", "5"],
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: 5 heads") and done.stderr.count("\n") == 1


def test_help_shows_an_example(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train", "--help"])
    with pytest.raises(SystemExit) as end:
        train.main()
    assert end.value.code == 0
    assert "example: python -m minidist.train --preset nano" in capsys.readouterr().out
