"""DeviceMesh: who is where, and who is in which group."""
import gc
import itertools
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from minidist import BadInput, dp, mesh
from minidist.collectives import all_reduce, broadcast
from minidist.engine.data import random_batch
from minidist.engine.optim import SGD
from minidist.mesh import DeviceMesh
from minidist.ranks.comm import run_threads, solo
from minidist.step import train_step
from tests import mpi
from tests.models import tiny

SHAPES = [dict(dp=2, tp=2), dict(pp=2, dp=2, tp=2), dict(dp=3, tp=2), dict(dp=2, pp=1, cp=2, tp=3),
          dict(dp=2, pp=2, cp=2, tp=2)]


def full(**sizes):
    return mesh.ordered({"dp": 1, "pp": 1, "cp": 1, "tp": 1, **sizes})


def test_groups_by_hand():
    sizes = full(dp=2, tp=2)
    assert mesh.groups(sizes, "tp") == [[0, 1], [2, 3]]
    assert mesh.groups(sizes, "dp") == [[0, 2], [1, 3]]
    assert mesh.groups(sizes, "pp") == [[0], [1], [2], [3]]
    assert mesh.groups(sizes, "dp", "tp") == [[0, 1, 2, 3]]


def test_groups_as_megatron_numbers_them():
    """tp 2, dp 2, pp 4 on 16 ranks: the example in its parallel_state."""
    sizes = full(tp=2, dp=2, pp=4)
    assert mesh.groups(sizes, "tp")[:2] == [[0, 1], [2, 3]]
    assert mesh.groups(sizes, "dp")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert mesh.groups(sizes, "pp")[0] == [0, 4, 8, 12]


def test_order_is_free():
    sizes = mesh.ordered(full(dp=2, tp=2), ("tp", "pp", "cp", "dp"))
    assert mesh.groups(sizes, "dp") == [[0, 1], [2, 3]]
    assert mesh.coordinates(1, sizes) == {"tp": 0, "pp": 0, "cp": 0, "dp": 1}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_groups_partition_the_world(shape):
    sizes = full(**shape)
    n = int(np.prod(list(sizes.values())))
    where = {tuple(mesh.coordinates(rank, sizes).values()) for rank in range(n)}
    assert len(where) == n
    for count in (1, 2, 3):
        for axes in itertools.combinations(sizes, count):
            members = sum(mesh.groups(sizes, *axes), [])
            assert sorted(members) == list(range(n))
    for a, b in itertools.combinations(sizes, 2):
        for g, h in itertools.product(mesh.groups(sizes, a), mesh.groups(sizes, b)):
            assert len(set(g) & set(h)) <= 1


def look(world, shape):
    """Sum the world ranks over every axis, and over dp and cp together."""
    m = DeviceMesh(world, **shape)
    for axis in m.sizes:
        assert (m[axis].size, m[axis].rank) == (m.sizes[axis], m.coords[axis])
        assert m[axis].name == axis
    me = np.array([world.rank])
    return {axes: int(all_reduce(me, m[axes])[0])
            for axes in ("tp", "dp", "pp", "cp", ("dp", "cp"), ("cp", "dp"), tuple(m.sizes))}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_group_holds_the_ranks_of_the_table(shape):
    sizes = full(**shape)
    n = int(np.prod(list(sizes.values())))
    for rank, sums in enumerate(run_threads(n, look, shape)):
        for axes, found in sums.items():
            axes = (axes,) if isinstance(axes, str) else axes
            group = next(g for g in mesh.groups(sizes, *axes) if rank in g)
            assert found == sum(group), (rank, axes)


def test_sums_by_hand():
    sums = run_threads(4, look, dict(dp=2, tp=2))
    assert [s["tp"] for s in sums] == [1, 1, 5, 5]
    assert [s["dp"] for s in sums] == [2, 4, 2, 4]


def test_a_root_is_a_coordinate_not_a_world_rank():
    def fn(world):
        m = DeviceMesh(world, dp=2, tp=2)
        return int(broadcast(np.array([world.rank]), m["dp"], root=0)[0])
    assert run_threads(4, fn) == [0, 1, 0, 1]


def test_a_joint_group_of_one_long_axis_is_that_axis():
    def fn(world):
        m = DeviceMesh(world, dp=2, tp=2)
        return m["dp", "cp"] is m["dp"] and m["cp", "pp"].size == 1 and m["dp", "tp"].size == 4
    assert all(run_threads(4, fn))


def test_one_process_has_every_axis():
    m = DeviceMesh(solo())
    assert all(m[axis].size == 1 for axis in ("dp", "pp", "cp", "tp"))
    assert set(m.coords.values()) == {0}


@pytest.mark.parametrize("shape, words", [
    (dict(dp=2, tp=3), ["needs 6 ranks", "4 are running", "-n 6"]),
    (dict(dp=1, tp=2), ["needs 2 ranks", "4 are running", "dp=2"]),
    (dict(dp=0), ["dp", "0", "smallest is 1"])])
def test_a_mesh_that_does_not_fit_is_refused_on_all_ranks(shape, words):
    def fn(world):
        with world.counting() as sent, pytest.raises(BadInput) as error:
            DeviceMesh(world, **shape)
        return str(error.value), sent.messages
    results = run_threads(4, fn)
    assert len(set(results)) == 1 and results[0][1] == 0
    assert all(word in results[0][0] for word in words), results[0][0]


def test_an_unknown_axis_or_order_is_refused():
    with pytest.raises(BadInput, match="no axis xp in a mesh of pp, dp, cp, tp"):
        DeviceMesh(solo())["xp"]
    with pytest.raises(BadInput, match="each of the axes"):
        mesh.ordered({"dp": 1, "pp": 1, "cp": 1, "tp": 1}, ("dp", "tp"))


# ------------------------------------------------------------------ experts, and axes as data

def test_dp_is_edp_times_ep():
    grid = mesh.factored(full(dp=4, tp=2), 2)
    assert list(grid) == ["pp", "edp", "ep", "cp", "tp"]
    assert mesh.groups(grid, "ep")[:2] == [[0, 2], [1, 3]]
    assert mesh.groups(grid, "edp")[:2] == [[0, 4], [1, 5]]
    assert mesh.groups(grid, "edp", "ep") == mesh.groups(full(dp=4, tp=2), "dp")


@pytest.mark.parametrize("sizes", [dict(dp=4, ep=2), dict(dp=2, ep=2), dict(dp=2, tp=2, ep=1),
                                   dict(pp=2, dp=2, ep=2), dict()], ids=str)
def test_every_group_says_its_axes(sizes):
    def fn(world):
        m = DeviceMesh(world, **sizes)
        found = {axis: (m[axis].size, m[axis].rank, m[axis].axes, m[axis].name)
                 for axis in ("pp", "dp", "cp", "tp", "edp", "ep")}
        for axis, (size, at, axes, name) in found.items():
            spelled = ("dp",) if axis == "edp" and sizes.get("ep", 1) == 1 else (axis,)
            assert size == {**m.sizes, **m.grid}[axis] and at == m.coords[axis]
            assert axes == spelled and name == spelled[0]
            assert m[axes] is m[axis] and m[axis].mesh is m
        assert m.coords["dp"] == m.coords["edp"] * m.grid["ep"] + m.coords["ep"]
        joint = m["dp", "tp"]
        assert joint.size == m.sizes["dp"] * m.sizes["tp"] and m[joint.axes] is joint
        return m.factors(["tp", "dp"]) == m.factors([("edp", "ep"), "tp"]) == ("edp", "ep", "tp")

    count = int(np.prod([size for axis, size in sizes.items() if axis != "ep"]))
    assert run_threads(count, fn) == [True] * count


def test_experts_that_do_not_divide_dp_are_refused():
    with pytest.raises(BadInput, match="4 ranks that share the experts .* 6 of dp; use ep = 1, 2,"):
        mesh.factored(full(dp=6), 4)
    with pytest.raises(BadInput, match="axis ep has size 0"):
        DeviceMesh(solo(), ep=0)


def give_and_take(world, meshes, models):
    """Make and close meshes, then wrapped models on one.  -> threads, files, groups that stay"""
    def state():
        gc.collect()
        return np.array([threading.active_count(), len(os.listdir("/proc/self/fd")),
                         len(world._everyone())])

    def wrap_and_step(grid, i):
        with dp.DistributedDataParallel(tiny(layers=1), grid["dp"]) as model:
            train_step(model, random_batch(13, 8, 4, 0, i), SGD(model.parameters(), 0.1))

    before = state()
    for _ in range(meshes):
        DeviceMesh(world, dp=world.size).close()
    after_meshes = state() - before
    with DeviceMesh(world, dp=world.size) as grid:
        world.barrier()
        before = state()
        for i in range(models):
            wrap_and_step(grid, i)
        world.barrier()
        after_models = state() - before
    return [after_meshes.tolist(), after_models.tolist()]


@mpi.mpi(2)
def test_300_meshes_and_100_wrapped_models_leave_nothing(comm):
    """MPICH would run out of communicators after 250 meshes."""
    assert give_and_take(comm, 300, 100) == [[0, 0, 0]] * 2


def test_meshes_over_threads_leave_no_groups():
    for meshes, models in run_threads(2, give_and_take, 20, 20):
        assert meshes[2] == models[2] == 0


PICTURE = """\
DeviceMesh pp=2 x dp=2 x cp=1 x tp=2: 8 ranks, outermost axis first

           dp 0         dp 1
         tp 0 tp 1    tp 0 tp 1
  pp 0      0    1       2    3
  pp 1      4    5       6    7

  axis  size  groups
  tp       2  [0 1] [2 3] [4 5] [6 7]                             talks in every layer
  dp       2  [0 2] [1 3] [4 6] [5 7]                             talks once per step: gradients
  pp       2  [0 4] [1 5] [2 6] [3 7]                             talks at the border of two stages
"""


def test_the_picture_needs_no_ranks(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["mesh", "--dp", "2", "--pp", "2", "--tp", "2"])
    mesh.main()
    assert capsys.readouterr().out == PICTURE


def test_a_wrong_order_ends_with_one_sentence():
    run = [sys.executable, "-m", "minidist.mesh", "--order", "dp,tp"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == ("error: the order dp,tp must name each of the axes pp,dp,cp,tp once; "
                           "such as --order pp,dp,cp,tp\n")


@mpi.mpi(4)
def test_groups_over_mpi(comm):
    sums = look(comm, dict(dp=2, tp=2))
    assert sums["tp"] == [1, 1, 5, 5][comm.rank] and sums["dp"] == [2, 4, 2, 4][comm.rank]


def test_a_mesh_describes_itself():
    def fn(world):
        m = DeviceMesh(world, dp=2, tp=2)
        return m.describe(), repr(m)
    assert run_threads(4, fn)[0] == ("4 ranks: dp=2 x tp=2", "DeviceMesh(pp=1, dp=2, cp=1, tp=2)")
    assert DeviceMesh(solo()).describe() == "1 rank"
