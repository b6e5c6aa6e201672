"""From flags to a mesh and a spread model; training over ranks, verified, from the command line."""
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from minidist import BadInput, fuzz, parallel, sweep, train
from minidist.dp import DistributedDataParallel
from minidist.engine.gpt import GPT
from minidist.ranks import launch
from minidist.ranks.comm import run_threads
from tests.models import tiny
from tests.mpi import execute, need_mpi

RUN = ["--preset", "lesson", "--layers", "2", "--steps", "3", "--batch", "4", "--sample", "0",
       "--no-figure"]
BROKEN = """
from minidist import buckets, train
from minidist.ranks import launch
buckets.all_reduce = lambda x, comm, **options: x
launch.run(train.main)
"""


def wanted(batch=12, **axes):
    sizes = {axis: axes.get(axis) for axis in parallel.OFFERED}
    return SimpleNamespace(batch=batch, sp=None, **sizes)


@pytest.mark.parametrize("ranks, dp, expected", [(1, None, 1), (3, None, 3), (2, 2, 2)])
def test_replicas_take_the_ranks_that_are_left(ranks, dp, expected):
    def fn(world):
        return parallel.make_mesh(wanted(dp=dp), world).sizes["dp"]
    assert run_threads(ranks, fn) == [expected] * ranks


def test_what_does_not_fit_is_refused_on_every_rank():
    def fn(world, args, words):
        with world.counting() as sent, pytest.raises(BadInput, match=words):
            parallel.make_mesh(args, world)
        return sent.messages
    assert run_threads(4, fn, wanted(dp=3), "needs 3 ranks and 4 are running") == [0] * 4
    assert run_threads(4, fn, wanted(batch=3), "3 sequences .* 4 replicas .* --batch 4") == [0] * 4


def test_one_process_is_left_plain():
    model = tiny()
    mesh = parallel.make_mesh(wanted())
    assert parallel.spread(model, mesh) is model and isinstance(model, GPT)


def test_replicas_become_data_parallel():
    def fn(world):
        return type(parallel.spread(tiny(), parallel.make_mesh(wanted(), world)))
    assert run_threads(2, fn) == [DistributedDataParallel] * 2


# ----------------------------------------------------------------------- the training command

def command(ranks, *flags):
    need_mpi()
    return execute(launch.command(ranks, [sys.executable, "-m", "minidist.train", *RUN, *flags]),
                   timeout=600)


def test_training_on_ranks_is_verified(tmp_path):
    data = tmp_path / "run.json"
    status, out = command(3, "--dp", "3", "--verify", "--grad-accum", "2", "--dropout", "0.1",
                          "--json", str(data))
    assert status == 0, out
    assert "3 ranks: dp=3" in out and "compared   3 of 3 steps" in out
    verdict = json.loads(data.read_text())["verdict"]
    assert verdict.startswith("EQUIVALENT  max relative difference") and verdict in out


def test_verify_compares_as_many_steps_as_it_is_told():
    status, out = command(2, "--dp", "2", "--verify", "2")
    assert status == 0 and "compared   2 of 3 steps" in out, out
    assert command(2, "--verify", "0")[0] == 2


def test_a_difference_ends_with_status_1():
    """The same command, with a DistributedDataParallel that never sums."""
    need_mpi()
    status, out = execute(launch.command(2, [sys.executable, "-c", BROKEN, *RUN, "--verify"]))
    assert status == 1, out
    assert "DIVERGED at step 0: " in out and "Traceback" not in out


def test_ranks_that_do_not_fit_end_with_status_2_and_one_sentence():
    status, out = command(2, "--dp", "3")
    assert status == 2, out
    errors = [line for line in out.splitlines() if "error" in line]
    assert errors == ["error: the mesh pp=1 x dp=3 x cp=1 x tp=1 needs 3 ranks and 2 are running; "
                      "start 3 with -n 3 or use dp=2"]


def test_verify_is_refused_in_float32(capsys):
    run = [sys.executable, "-m", "minidist.train", *RUN, "--verify", "--dtype", "float32"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: --verify compares in float64")


def test_the_same_run_on_one_process_and_on_ranks_gives_the_same_losses(tmp_path):
    losses = []
    for ranks in (1, 2):
        data = tmp_path / f"{ranks}.json"
        status, out = command(ranks, "--dtype", "float64", "--json", str(data))
        assert status == 0, out
        losses.append(json.loads(data.read_text())["losses"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-13)


def test_options_are_what_verify_needs_and_stay():
    options = train.options(["--verify"])
    assert (options.dtype, options.eps) == ("float64", 1e-5)
    with pytest.raises(AttributeError):
        options.dtype = "float32"
    assert (train.options([]).dtype, train.options([]).eps) == ("float32", 1e-8)


def test_zero_with_tensor_and_sequence_parallelism_is_verified():
    status, out = command(4, "--dp", "2", "--tp", "2", "--sp", "--zero", "3", "--grad-accum", "2",
                          "--clip", "0.5", "--dropout", "0.1", "--verify")
    assert status == 0 and "EQUIVALENT" in out, out


# ----------------------------------------------------------------------- everything at once

CUBE = dict(dp=2, pp=2, tp=2)
LAYOUTS = [
    CUBE, dict(pp=2, tp=4), dict(dp=2, tp=4), dict(dp=4, pp=2),
    dict(dp=2, cp=2, tp=2), dict(pp=2, cp=2, tp=2), dict(dp=2, pp=2, cp=2),
    CUBE | {"experts": 4, "ep": 2}, dict(dp=4, tp=2, experts=4, ep=2),
    CUBE | {"zero": 1}, dict(dp=2, tp=4, zero=3), dict(dp=4, tp=2, zero=3, sp="again"),
    CUBE | {"sp": "keep"}, CUBE | {"recompute": "blocks"}, CUBE | {"schedule": "interleaved"},
    CUBE | {"precision": "fp16"}, dict(dp=4, tp=2, zero=3, offload="DIR"),
    CUBE | {"cp": 2}, dict(dp=2, pp=3, tp=4)]                                   # 16, 24 ranks


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=lambda i: str(LAYOUTS[i]))
def test_eight_ranks_and_more_train_as_one(number):
    """With dropout, ragged targets, grouped heads, a tied head, clipping, uneven rows: 4 steps."""
    flags = LAYOUTS[number] | ({"grad-accum": 2} if "pp" in LAYOUTS[number] else {})
    outcome = sweep.train(flags, ["adamw", "sgd"][number % 2], steps=4)
    assert outcome.kind == fuzz.EQUIVALENT, outcome.line()


def test_eight_processes_are_verified_from_the_command_line():
    status, out = command(8, "--dp", "2", "--tp", "2", "--pp", "2", "--steps", "2", "--verify")
    assert status == 0 and "EQUIVALENT" in out, out
