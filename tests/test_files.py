"""Files of commands: whole or as they were; what is no plain file is written through (F1 to F6)."""
import json
import os
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest

from lessons import kit, script
from minidist import BadInput, files, parallel, train
from minidist.bench import train as bench_train
from minidist.ranks import launch
from minidist.ranks.comm import run_threads
from tests.mpi import execute, need_mpi

TRAIN = [sys.executable, "-m", "minidist.train", "--preset", "lesson", "--layers", "1", "--batch",
         "4", "--sample", "0", "--steps", "2"]
STEEP = ["--optimizer", "sgd", "--clip", "0", "--lr", "1e9"]


def command(*argv, cwd, errors="strict", **env):
    """Run a command to its end.  -> (status, stdout, stderr)"""
    root = os.path.dirname(os.path.dirname(files.__file__))
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=300,
                          errors=errors, env={**os.environ, "PYTHONPATH": root, **env})
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def put(path, content=b"new"):
    files.ready(path)
    files.write(path, lambda file: file.write(content))


# --------------------------------------------------------------------- plain files

def test_write_makes_folders_and_replaces(tmp_path):
    path = tmp_path / "a" / "b.txt"
    files.ready(path)
    assert not list(tmp_path.iterdir())                    # asking leaves nothing behind
    put(path, b"one")
    put(path, b"two")
    assert path.read_bytes() == b"two" and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("link", [False, True])
def test_an_interrupted_write_changes_nothing(tmp_path, link):
    path = tmp_path / "b.txt"
    put(path, b"old")
    name = tmp_path / "name" if link else path
    if link:
        name.symlink_to(path)

    def fill(file):
        file.write(b"half of the n")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        files.write(name, fill)
    assert path.read_bytes() == b"old" and set(tmp_path.iterdir()) == {path, name}


def test_unwritable(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path, tmp_path / "file" / "x", "/proc/self/x", tmp_path / "loop",
                 tmp_path / (300 * "a"), tmp_path / (300 * "a") / "b"):
        with pytest.raises(BadInput, match="directory|cannot write"):
            files.ready(path)


# --------------------------------------------------------------------- F1: no plain file

def test_F1_the_longest_name_a_mode_and_somebody_s_part_file_survive(tmp_path):
    path, part = tmp_path / (254 * "a"), tmp_path / "x.part"
    put(path)
    path.chmod(0o640)
    part.write_bytes(b"somebody's")
    put(path, b"newer")
    put(tmp_path / "x")
    assert path.read_bytes() == b"newer" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert part.read_bytes() == b"somebody's" and len(list(tmp_path.iterdir())) == 3


def test_F1_a_link_stays_and_its_file_is_written(tmp_path):
    (tmp_path / "deep").mkdir()
    for target in (tmp_path / "there", tmp_path / "deep" / "not yet"):
        link = tmp_path / f"to {target.name}"
        link.symlink_to(target)
        if target.name == "there":
            target.write_bytes(b"old")
        put(link)
        assert link.is_symlink() and target.read_bytes() == b"new"
    chain = tmp_path / "chain"
    chain.symlink_to("to there")
    put(chain, b"newest")
    assert chain.is_symlink() and (tmp_path / "there").read_bytes() == b"newest"


def test_F1_two_names_of_one_file_keep_both(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"a longer old text")
    os.link(one, two)
    put(one)
    assert two.read_bytes() == b"new" and os.path.samefile(one, two)


def test_F1_pipes_and_devices_are_written_through(tmp_path):
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    put(pipe)
    reader.join(30)
    assert found == [b"new"] and stat.S_ISFIFO(pipe.stat().st_mode)
    before = os.stat("/dev/null")
    put("/dev/null")
    assert os.stat("/dev/null").st_rdev == before.st_rdev and before.st_ino == os.stat(
        "/dev/null").st_ino


def test_F1_what_a_command_prints_to_is_not_cut_off(tmp_path):
    """--json /dev/stdout, with the output in a file: the text stays and the data follow."""
    code = ("from minidist import files; print('text'); "
            "files.write('/dev/stdout', files.numbers([1])); print('more')")
    with open(tmp_path / "out", "w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, timeout=60)
    text = (tmp_path / "out").read_text()
    assert text.startswith("text\n[") and text.endswith("]more\n"), text


# --------------------------------------------------------------------- F2: nothing is lost

def test_F2_a_picture_that_fails_takes_nothing_along(tmp_path, capsys):
    def draw(figure):
        raise ValueError("no such\n  font")
    status = files.deliver(("picture", tmp_path / "p.png", files.picture(draw)),
                           ("data", tmp_path / "d.json", files.numbers([1.5])),
                           ("none", None, None))
    said = capsys.readouterr()
    assert status == 1 and json.loads((tmp_path / "d.json").read_text()) == [1.5]
    assert said.out == f"data       {tmp_path / 'd.json'}\n"
    assert said.err == f"error: cannot write {tmp_path / 'p.png'}: ValueError: no such font\n"
    assert [p.name for p in tmp_path.iterdir()] == ["d.json"]


def test_F2_a_full_disk_at_the_end_costs_the_file_and_not_the_picture(tmp_path):
    status, out, err = command(*TRAIN, "--json", "/dev/full", cwd=tmp_path)
    assert status == 1 and "parameters sha256" in out and (tmp_path / "out/loss.png").exists()
    assert err == "error: cannot write /dev/full: No space left on device\n"


DRAW = ("from minidist import files; files.drawable(); files.write('p.png', files.picture("
        "lambda figure: figure.subplots().set_title('title')))")


@pytest.mark.parametrize("env", [{"MPLBACKEND": "module://matplotlib_inline.backend_inline"},
                                 {"MPLBACKEND": "bogus"}, {"MATPLOTLIBRC": "usetex"}])
def test_F2_pictures_are_drawn_whatever_this_user_s_matplotlib_is_told(tmp_path, env):
    (tmp_path / "usetex").write_text("text.usetex: True\nfont.size: 500\n")
    status, out, err = command(sys.executable, "-c", DRAW, cwd=tmp_path, **env)
    assert status == 0, err
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_F2_a_matplotlib_that_does_not_start_is_known_before_the_first_step(tmp_path):
    (tmp_path / "rc").write_bytes(b"caf\xe9: 1\n")
    status, out, err = command(*TRAIN, cwd=tmp_path, MATPLOTLIBRC="rc")
    assert status == 2 and out == "" and "matplotlib does not start here" in err


def test_F2_a_terminal_that_knows_no_accents(tmp_path):
    (tmp_path / "t\xe9xt").write_text("\xe9t\xe9 \u4e2d " * 50, encoding="utf-8")
    status, out, _ = command(*TRAIN, "--text", "t\xe9xt", "--sample", "30", "--no-figure",
                             cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert status == 0 and "\\xe9" in out and "parameters sha256" in out
    simulate = [sys.executable, "-m", "minidist.simulate"]
    assert command(*simulate, cwd=tmp_path, PYTHONIOENCODING="latin-1")[1] == command(
        *simulate, "--ascii", cwd=tmp_path)[1]


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Run the command in this process.  -> its data"""
    monkeypatch.chdir(tmp_path)

    def run(*argv, trouble=None):
        monkeypatch.setattr(sys, "argv", [*TRAIN[2:], "--json", "t.json", *argv])
        if trouble is None:
            assert train.main() == 0
        else:
            with pytest.raises(BadInput, match=trouble):
                train.main()
        text = (tmp_path / "t.json").read_text()
        assert "NaN" not in text and "Infinity" not in text
        return json.loads(text)
    return run


def test_F2_training_that_overflows_keeps_what_it_has(trained, tmp_path):
    data = trained(*STEEP, "--steps", "9", trouble="step .*use a smaller --lr than the 9.7e.08 of")
    assert 1 <= len(data["losses"]) < 9 and data["sample"] == "" and data["trouble"][:4] == "step"
    assert (tmp_path / "out/loss.png").exists()
    assert trained("--steps", "1", "--no-figure")["trouble"] == ""


def test_F2_ctrl_c_keeps_the_losses(trained, monkeypatch):
    class Impatient(train.Progress):
        def move(self, history):
            if len(history.losses) == 2:
                raise KeyboardInterrupt
    monkeypatch.setattr(train, "Progress", Impatient)
    with pytest.raises(KeyboardInterrupt):
        trained("--steps", "9", "--no-figure")
    with open("t.json") as file:
        assert len(json.load(file)["losses"]) == 2


def test_F2_too_little_memory_is_one_sentence(trained, monkeypatch):
    def unlucky(*args, **options):
        np.empty(1 << 58)
    monkeypatch.setattr(train, "train_step", unlucky)
    monkeypatch.setattr(sys, "argv", TRAIN[2:])
    with pytest.raises(BadInput, match="not enough memory: .* use a smaller --batch"):
        train.main()


def test_F5_what_fits_no_memory_is_one_sentence_in_a_benchmark_too(tmp_path):
    bench = [sys.executable, "-m", "minidist.bench"]
    for part in (["attention", "--tokens", "999999999998", "--no-torch"],
                 ["tp", "-n", "2", "--batch", "99999999999"]):
        status, _, err = command(*bench, *part, cwd=tmp_path)
        assert status == 2 and "error: not enough memory: Unable to allocate" in err, err


# ------------------------------------------------------------ F3, F4: other ranks, other inputs

def test_F3_fewer_words_than_ranks_are_refused():
    from minidist import tp
    from tests.models import tiny

    def fn(world):
        with world.counting() as sent, pytest.raises(BadInput, match="1 word does not give each "
                                                                     "of 2 ranks of --tp one"):
            tp.parallelize(tiny(vocab=1), world)
        return sent.messages
    assert run_threads(2, fn) == [0, 0]


def test_F4_another_text_on_one_rank_is_refused(tmp_path):
    """The same name, and something else behind it: each process's own environment, here."""
    need_mpi()
    ranks = launch.command(2, [*TRAIN, "--no-figure", "--text", "/proc/self/environ"])
    status, out = execute(ranks, timeout=300)
    assert status == 2 and "Traceback" not in out, out
    assert "error: rank 1 has another text than rank 0 (sha256 " in out and "step" not in out


def test_F4_what_one_rank_refuses_all_refuse():
    def look(rank):
        if rank == 2:
            raise BadInput("cannot read text: No such file")
        return rank

    def fn(world):
        assert parallel.agreed(world, lambda: world.rank) == world.rank
        parallel.alike(world, text="a", seed="0")
        with pytest.raises(BadInput, match="rank 1 has another seed than rank 0"):
            parallel.alike(world, text="a", seed=str(world.rank % 2))
        with pytest.raises(BadInput) as error:
            parallel.agreed(world, lambda: look(world.rank))
        return str(error.value)
    assert set(run_threads(3, fn)) == {"cannot read text: No such file (on rank 2)"}


# --------------------------------------------------------------------- F5: before, not after

def test_F5_two_outputs_in_one_place_and_an_input_are_refused(tmp_path):
    (tmp_path / "link").symlink_to("a")
    for paths in (["a", "a"], ["a", "a/b"], ["a/b", "a"], ["link", "a"], ["a", "./c/../a"]):
        with pytest.raises(BadInput, match="cannot both be written"):
            files.ready(*(tmp_path / path for path in paths))
    with pytest.raises(BadInput, match="without loss of"):
        files.ready(tmp_path / "link", keep=[None, tmp_path / "a"])
    files.ready("/dev/null", "/dev/null", None, tmp_path / "a", tmp_path / "b", keep=[None])


@pytest.mark.parametrize("argv, words", [
    (["--json", "/no/x"], "cannot write /no/x|/no"), (["--trace", "."], ". is a directory"),
    (["--out", "/proc/no"], "/proc.*"), (["--json", "x", "--trace", "x"], "cannot both be written"),
    (["--mine", "mine.py", "--json", "mine.py"], "without loss of mine.py")])
def test_F5_a_lesson_refuses_files_before_its_first_screen(monkeypatch, tmp_path, argv, words):
    import lessons.dp
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kit.exercises, "replacements", lambda *_: [])
    (tmp_path / "mine.py").write_text("")
    if argv[0] == "--json" and argv[1] == "/no/x":
        monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)
    with pytest.raises(BadInput, match=words):
        kit.run_on_threads(lessons.dp.SCREENS, 2, argv)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.py"]


def refuse(dir):                                                                  # noqa: A002
    raise PermissionError(13, "Permission denied")


def test_F5_a_lesson_says_on_how_many_ranks_it_runs():
    import lessons.tp
    assert set(script.RANKS) <= set(script.ORDER)
    with pytest.raises(BadInput, match="1, 2, 3, 4, 6 ranks, and 5 are running"):
        kit.run_on_threads(lessons.tp.SCREENS, 5, ["--no-figure"])


def test_F5_a_read_only_folder_stops_no_lesson_that_draws_nothing(monkeypatch, tmp_path):
    import lessons.schedules
    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)
    monkeypatch.chdir(tmp_path)
    assert kit.run_on_threads(lessons.schedules.SCREENS, 1, ["--prove", "--no-figure"])["ok"]
    with pytest.raises(BadInput, match="cannot write out/schedules.png: .*: Permission denied"):
        kit.run_on_threads(lessons.schedules.SCREENS, 1, ["--prove"])


def test_F5_a_lesson_that_cannot_write_goes_on_to_its_end(tmp_path):
    status, out, err = command(sys.executable, "-m", "lessons.schedules", "--prove", "--no-figure",
                               "--json", "/dev/full", cwd=tmp_path)
    assert status == 1 and err == "error: cannot write /dev/full: No space left on device\n"


def test_F5_unknown_words_and_names_that_are_no_utf8(tmp_path):
    for module in ("lessons", "minidist.simulate", "minidist.bench", "minidist.doctor"):
        status, out, err = command(sys.executable, "-m", module, "--bogus", cwd=tmp_path)
        assert status == 2 and out == "" and "--bogus" in err and err.count("\n") == 1, err
    status, out, _ = command(sys.executable, "-m", "minidist.simulate", "--json",
                             os.fsdecode(b"caf\xe9"), cwd=tmp_path, errors="surrogateescape")
    assert status == 0 and os.listdir(bytes(tmp_path)) == [b"caf\xe9"]


@pytest.mark.parametrize("given", ["\u00b2", "0", "-1", "two", ""])
def test_F5_a_number_of_ranks_that_is_none(given, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", "-n", given])
    with pytest.raises(BadInput, match="give the number of ranks, such as -n 4"):
        launch.wanted_ranks()


def test_F5_a_closed_stdin_stops_nothing(tmp_path):
    code = f"import os, sys; os.close(0); os.execv(sys.executable, {[*TRAIN, '--no-figure']!r})"
    assert command(sys.executable, "-c", code, cwd=tmp_path)[0] == 0


# --------------------------------------------------------------------- F6: what is no number

def test_F6_nan_is_no_result(trained):
    data = trained("--steps", "1", "--lr", "1e30", "--no-figure",
                   trouble="step 1: the loss on the text kept for validation is nan; use a smaller")
    assert data["val_losses"][1:] == [None] and len(data["losses"]) == 1


def test_F6_json_knows_no_nan():
    data = {"a": [np.float64("nan"), 1.5, (float("inf"), None)], "b": {"c": -np.inf, "d": "NaN"}}
    written = bytearray()
    files.numbers(data)(type("F", (), {"write": lambda self, x: written.extend(x)})())
    assert json.loads(bytes(written)) == {"a": [None, 1.5, [None, None]], "b": {"c": None,
                                                                             "d": "NaN"}}


def test_F6_scaling_is_measured_or_not_said(capsys):
    args = bench_train.parser().parse_args(["--ranks", "2"])
    laps = {(2, "ours"): [0.5], (1, "ours"): [1.0]}
    [alone] = bench_train.table(args, [2], laps)
    bench_train.show([alone])
    assert alone["scaling"] is None and " - " in capsys.readouterr().out
    assert [row["scaling"] for row in bench_train.table(args, [1, 2], laps)] == [1.0, 2.0]
