"""The line of a training run, on a terminal and elsewhere."""
import io
import sys

import pytest

from minidist.progress import History, Progress, clock
from minidist.step import Step


def shown(monkeypatch, terminal, fail=False, show=True):
    """Show three steps and a validation after each.  -> everything printed"""
    out = io.StringIO()
    out.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", out)
    history = History(val_losses=[2.0])
    with Progress(3, show=show) as progress:
        for loss in (3.0, 2.5, 1.0):
            history.add(Step(loss, 10, 1.0), seconds=0.5)
            progress.move(history)
            if fail:
                raise ValueError
            progress.mark(history)
    return out.getvalue()


def test_one_moving_line_on_a_terminal(monkeypatch):
    text = shown(monkeypatch, terminal=True)
    assert text.count("\n") == 1 and text.endswith("\n") and text.count("\r") == 6
    last = text.split("\r")[-1]
    assert last.startswith("step      3/3   loss 1.000   validation 2.000          20 tokens/s")
    assert "0:00 left" in last


def test_skipped_steps_are_shown(monkeypatch):
    assert "skipped" not in shown(monkeypatch, terminal=False)
    history = History(val_losses=[2.0])
    for norm in (1.0, float("inf"), float("inf")):
        history.add(Step(3.0, 10, norm, scale=8.0), seconds=0.5)
    assert Progress(3, show=False).line(history).endswith("left   2 skipped")


def test_plain_lines_elsewhere(monkeypatch):
    text = shown(monkeypatch, terminal=False)
    assert "\r" not in text and [line[10:26] for line in text.splitlines()] == \
        ["1/3   loss 3.000", "2/3   loss 2.500", "3/3   loss 1.000"]


def test_one_rank_shows(monkeypatch):
    assert shown(monkeypatch, terminal=True, show=False) == ""
    assert shown(monkeypatch, terminal=False, show=False) == ""


def test_an_error_gets_its_own_line(monkeypatch):
    with pytest.raises(ValueError):
        shown(monkeypatch, terminal=True, fail=True)
    assert sys.stdout.getvalue().endswith("\n")


def test_clock():
    assert [clock(s) for s in (0, 75, 3725)] == ["0:00", "1:15", "1:02:05"]
