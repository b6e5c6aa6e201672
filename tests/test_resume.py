"""train --save-every, --resume and --keep, and sample: the commands around checkpoints."""
import json
import sys

import numpy as np
import pytest

from minidist import BadInput, checkpoint, models, sample, storage, train
from minidist.ranks import launch
from minidist.ranks.comm import solo
from tests.mpi import execute, need_mpi

TEXT = "what is written is read again, and nothing else\n" * 40
SMALL = ["--preset", "lesson", "--layers", "1", "--batch", "4", "--steps", "6", "--dropout", "0.1",
         "--text", "words"]
QUIET = ["--no-figure", "--sample", "20", "--json", "t.json"]
SAVE = ["--save-every", "3"]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(storage.os, "fsync", lambda handle: None)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run train in this process.  -> its JSON, its output, its warnings"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words").write_text(TEXT)

    def run(*argv):
        monkeypatch.setattr(sys, "argv", ["train", *argv, *QUIET])
        assert train.main() == 0
        return json.loads((tmp_path / "t.json").read_text()), *capsys.readouterr()
    return run


@pytest.fixture
def ask(monkeypatch, capsys):
    """Run sample in this process.  -> what it prints"""
    def ask(*argv):
        monkeypatch.setattr(sys, "argv", ["sample", *argv])
        sample.main()
        return capsys.readouterr().out
    return ask


KEYS = "losses", "val_losses", "val_steps", "parameters_sha256", "sample"


@pytest.mark.parametrize("kind", [[], ["--precision", "fp16"], ["--experts", "3"]])
def test_D34_a_run_that_goes_on_ends_as_one_that_never_stopped(run, kind):
    """Batches, dropout, rate and curve, bit by bit, from flags that nobody had to repeat."""
    straight = run(*SMALL, *kind)[0]
    saved, out, _ = run(*SMALL, *SAVE, *kind)
    assert "latest     out/step_6\n" in out
    again, out, _ = run("--resume", "out/step_3")
    last = run("--resume", "out")[0]
    for key in KEYS:
        assert straight[key] == saved[key] == again[key] == last[key], key
    assert "going on from out/step_3, saved on 1 rank" in out
    assert len(again["losses"]) == 6 and again["val_steps"] == list(range(7))


def test_another_layout_of_the_micro_batches_goes_on_within_rounding(run):
    straight = run(*SMALL, *SAVE, "--dtype", "float64")[0]
    other = run("--resume", "out/step_3", "--grad-accum", "3", "--recompute", "blocks")[0]
    np.testing.assert_allclose(other["losses"], straight["losses"], rtol=1e-12)
    assert other["losses"][:3] == straight["losses"][:3] != other["losses"][3:]


def test_a_run_that_goes_on_saves_where_it_was_saved_and_keeps_what_is_asked(run, tmp_path):
    run(*SMALL, "--save-every", "4")
    assert {p.name for p in storage.committed(tmp_path / "out")} == {"step_4", "step_6"}
    run("--resume", "out/step_4", "--save-every", "1", "--keep", "2")
    assert {p.name for p in storage.committed(tmp_path / "out")} == {"step_5", "step_6"}
    assert not list((tmp_path / "out").glob("*.old")) + list((tmp_path / "out").glob("*.part"))


def test_a_damaged_checkpoint_is_passed_over_and_said_so(run, tmp_path):
    straight = run(*SMALL, *SAVE)[0]
    (tmp_path / "out/step_6/embed.wte.weight.npy").write_bytes(b"")
    again, out, _ = run("--resume", "out")
    assert "passed over: out/step_6/embed.wte.weight.npy has 0 bytes" in out
    assert "going on from out/step_3" in out and again["losses"] == straight["losses"]


def test_a_run_that_goes_on_is_compared_with_its_twin(run):
    run(*SMALL, *SAVE, "--dtype", "float64")
    again = run("--resume", "out/step_3", "--verify", "2")[0]
    assert again["verdict"].startswith("EQUIVALENT")


def test_a_save_that_fails_is_a_warning(run, tmp_path, monkeypatch):
    def full(target, index):
        if target.name == "step_6":
            raise OSError(28, "No space left on device", str(target))
        commit(target, index)

    commit = storage.commit
    monkeypatch.setattr(storage, "commit", full)
    data, _, warnings = run(*SMALL, *SAVE)
    assert len(data["losses"]) == 6 and warnings == (
        "warning: saving out/step_6 has failed: out/step_6: No space left on device; the training "
        "goes on\n")
    assert [p.name for p in storage.committed(tmp_path / "out")] == ["step_3"]


REFUSED = [
    (["--resume", "out", "--lr", "0.1"], "--lr is 0.1, and for out/step_6 it was not given"),
    (["--resume", "out", "--batch", "5"], "--batch is 5, and for out/step_6 it was 4"),
    (["--resume", "out", "--kv-heads", "3"], "--kv-heads is 3"),
    (["--resume", "out", "--steps", "7"], "--steps is 7, .* another training"),
    (["--resume", "out", "--text", "text"], "the text is not the one that out/step_6 was trained"),
    (["--resume", "out", "--verify"], "out/step_6 was trained in float32, and --verify compares"),
    (["--resume", "missing"], "there is no checkpoint to read in missing"),
    (["--resume", "out/step_4"], "there is no checkpoint to read in out/step_4"),
    ([*SMALL, *SAVE], "out holds step_6 of another run; go on from it with --resume out"),
    (["--resume", "out", "--out", "other", *SAVE], "other holds step_1 of another run"),
    (["--resume", "plain"], "plain/step_0 was not saved by minidist.train"),
    ([*SMALL, *SAVE, "--out", "text"], "cannot write text/latest")]


def test_what_would_be_another_training_is_refused_and_changes_no_file(run, tmp_path):
    run(*SMALL, *SAVE)
    (tmp_path / "text").write_text("to be or not to be " * 20)
    (tmp_path / "other/step_1").mkdir(parents=True)
    o = train.options(SMALL)
    model = models.plain(o, models.configure(o, 7))
    checkpoint.save("plain", model, models.make_optimizer(model.parameters(), o, model.config))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for argv, words in REFUSED:
        with pytest.raises(BadInput, match=words):
            run(*argv)
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*")
                          if path.is_file()}


def test_a_sample_from_a_checkpoint_is_that_of_the_training(run, ask):
    data, _, _ = run(*SMALL, *SAVE)
    assert ask("--from", "out", "--length", "20") == "\n" + data["sample"] + "\n"
    assert ask("--from", "out/step_3", "--prompt", "what ", "--length", "5").startswith("what ")
    assert ask("--from", "out", "--prompt", "a", "--length", "9", "--seed", "1") != ask(
        "--from", "out", "--prompt", "a", "--length", "9")
    with pytest.raises(BadInput, match="the character 'Q' does not occur"):
        ask("--from", "out", "--prompt", "Q")
    with pytest.raises(BadInput, match="there is no checkpoint to read in missing"):
        ask("--from", "missing")


def test_two_processes_save_and_one_goes_on(run, tmp_path):
    need_mpi()
    small = [str(tmp_path / word) if word == "words" else word for word in SMALL]
    command = [sys.executable, "-m", "minidist.train", *small, *SAVE, *QUIET[:-1],
               str(tmp_path / "m.json"), "--out", str(tmp_path / "out"), "--dtype", "float64",
               "--dp", "2", "--zero", "3"]
    status, output = execute(launch.command(2, command), 600)
    assert status == 0, output
    straight = json.loads((tmp_path / "m.json").read_text())
    again = run("--resume", "out/step_3")[0]
    np.testing.assert_allclose(again["losses"], straight["losses"], rtol=1e-12)
    assert checkpoint.find(tmp_path / "out", solo()).index["mesh"] == "2 ranks: dp=2"
