"""Placement: cutting and joining, the gradient rule, norms that count each element once."""
import math
from dataclasses import replace

import numpy as np
import pytest

from minidist import placement
from minidist.engine.nn import Parameter
from minidist.mesh import DeviceMesh
from minidist.placement import Flat, Held, Shard, cut, finalize, grad_norm, join, lay, same
from minidist.ranks.comm import run_threads

PARTS = {1: [[2, 0, 1, 3, 4]], 2: [[1, 3, 4], [0, 2]], 3: [[4], [], [0, 1, 2, 3]],
         4: [[0], [3, 1], [2], [4]]}


def parameter(x, name="w", grad=None):
    p = Parameter(np.array(x, float), name)
    if grad is not None:
        p.grad = np.array(grad, float)
    return p


def parts(p):
    return [np.array(part, int) for part in PARTS[p]]


# ----------------------------------------------------------------------------- cut and join

@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shards_join_to_the_whole(p, dim):
    x = np.moveaxis(np.arange(30.0).reshape(5, 2, 3), 0, dim)

    def fn(comm):
        shard = Shard(dim, parts(p), comm)
        mine = shard.cut(x)
        assert np.array_equal(mine, np.take(x, PARTS[p][comm.rank], dim))
        return shard.join(mine)

    assert all(np.array_equal(whole, x) for whole in run_threads(p, fn))


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(3, 5), (2,), (), (0, 4)])
def test_flat_pieces_join_to_the_whole(p, shape):
    x = np.arange(float(math.prod(shape))).reshape(shape) + 1

    def fn(comm):
        flat = Flat(shape, comm)
        mine = flat.cut(x)
        assert mine.shape == (flat.size,)
        return flat.join(mine)

    for whole in run_threads(p, fn):
        assert whole.shape == shape and np.array_equal(whole, x)


def test_two_axes_join_in_reverse_order():
    """dp cuts flat what tp has cut by columns: join must undo dp first."""
    x = np.arange(20.0).reshape(5, 4)

    def fn(world):
        mesh, p = DeviceMesh(world, dp=2, tp=2), parameter(x)
        cut(p, "tp", Shard(0, parts(2), mesh["tp"]))
        cut(p, "dp", Flat(p.shape, mesh["dp"]))
        return join(p, p.data)

    assert all(np.array_equal(whole, x) for whole in run_threads(4, fn))


def test_a_tied_parameter_is_cut_once():
    def fn(comm):
        p = parameter(np.arange(5.0))
        cut(p, "tp", Shard(0, parts(2), comm))
        cut(p, "tp", Shard(0, parts(2), comm))
        with pytest.raises(ValueError, match="w is cut over tp already, in another way"):
            cut(p, "tp", Shard(0, parts(2)[::-1], comm))
        return p.size
    assert run_threads(2, fn) == [3, 2]


def test_a_shard_of_what_is_flat_is_refused():
    def fn(world):
        mesh, p = DeviceMesh(world, dp=2), parameter(np.ones((5, 2)))
        cut(p, "dp", Flat(p.shape, mesh["dp"]))
        with pytest.raises(ValueError, match="flat over dp.*cut it over tp first"):
            cut(p, "tp", Shard(0, parts(1), mesh["tp"]))
        return p.shape
    assert run_threads(2, fn) == [(5,), (5,)]


# ------------------------------------------------------------------------- the gradient rule

def finished(sizes, make, count=1, params=1):
    """Run finalize on make(mesh) -> parameters; return each rank's gradients."""
    def fn(world):
        mesh = DeviceMesh(world, **sizes)
        mine = make(mesh)
        finalize(mine, mesh, count)
        return [p.grad for p in mine]
    return run_threads(math.prod(sizes.values()), fn)


def partial(p, *axes):
    p.partial.update(axes)
    return p


def test_sum_over_exactly_the_partial_axes():
    """Ranks hold 1, 10, 100, 1000: only dp, only tp, both, none; then / 2, once."""
    def make(mesh):
        g = [10.0 ** mesh.world.rank]
        return [partial(parameter([0.0], name, g), *name.split()) for name in
                ("dp", "tp", "dp tp", "cp")]
    got = finished({"dp": 2, "tp": 2}, make, count=2)
    assert [[g.item() * 2 for g in grads] for grads in got] == [
        [101, 11, 1111, 1], [1010, 11, 1111, 10], [101, 1100, 1111, 100],
        [1010, 1100, 1111, 1000]]


def test_divided_once_by_all_targets():
    """x = 1, 2, 3 on one rank, 7 on the other, loss w x: 13 / 4, not (2 + 7) / 2."""
    def make(mesh):
        return [partial(parameter([0.0], grad=[[6.0], [7.0]][mesh.coords["dp"]]), "dp")]
    assert finished({"dp": 2}, make, count=4) == [[3.25], [3.25]]


def test_a_gradient_on_some_ranks_only():
    def make(mesh):
        here = [4.0] if mesh.world.rank == 0 else None
        return [partial(parameter([1.0], "some", here), "dp"),
                partial(parameter([1.0], "none"), "dp"), parameter([1.0], "plain")]
    assert finished({"dp": 3}, make, count=2) == [[2.0, None, None]] * 3


def test_a_parameter_held_by_two_stages_is_summed_over_them():
    """The tied embedding of a pipeline: stages 0 and 2 of 3."""
    def make(mesh):
        stage = mesh.coords["pp"]
        ends = mesh["pp"].split(0 if stage != 1 else 1, name="ends")
        mine = [partial(parameter([0.0], f"own.{stage}", [1.0]), "dp")]
        if stage != 1:
            tied = partial(parameter([0.0], "tied", [10.0 ** stage]), "dp", "pp")
            tied.placements["pp"] = Held((0, 2), ends)
            mine.append(tied)
        return mine
    assert finished({"pp": 3, "dp": 2}, make) == (
        [[2.0, 202.0]] * 2 + [[2.0]] * 2 + [[2.0, 202.0]] * 2)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_sliced_gradient_ends_as_its_piece(p):
    """The optimizer's state is flat over dp: reduce_scatter, and join gives the whole sum."""
    x = np.arange(10.0).reshape(5, 2)

    def fn(world):
        mesh, w = DeviceMesh(world, dp=p), parameter(x, grad=x * (world.rank + 1))
        w.sliced["dp"] = Flat(w.shape, mesh["dp"])
        w.partial.add("dp")
        finalize([w], mesh, 1)
        assert w.grad.shape == (-(-10 // p),)
        return join(w, w.grad, sliced=True), grad_norm([w], mesh), join(w, w.data)

    for grad, norm, whole in run_threads(p, fn):
        total = x * sum(range(1, p + 1))
        assert np.array_equal(grad, total) and np.array_equal(whole, x)
        assert norm == pytest.approx(np.linalg.norm(total), rel=1e-15)


def test_nothing_is_sent_for_what_is_complete():
    def fn(world):
        mesh = DeviceMesh(world, dp=2)
        ps = [partial(parameter([1.0], "cp", [1.0]), "cp", "tp"), parameter([1.0], "own", [1.0])]
        with world.counting() as sent:
            finalize(ps, mesh, 1)
        return sent.messages
    assert run_threads(2, fn) == [0, 0]


# ------------------------------------------------------------------------------------- norms

def test_norm_with_a_replicated_and_a_sharded_gradient():
    """[3] and [4] in two shards, [12] on both ranks: 13, not 17.69 and not 12.37."""
    def fn(world):
        mesh = DeviceMesh(world, tp=2)
        cutted, whole = parameter([0.0], "w", [3.0 + world.rank]), parameter([0.0], "n", [12.0])
        cutted.placements["tp"] = Shard(0, [[0], [1]], mesh["tp"])
        return grad_norm([cutted, whole], mesh)
    assert run_threads(2, fn) == [13.0, 13.0]


def test_norm_over_pipeline_stages():
    """[3, 4] on one stage, [12] on the next: every rank says 13."""
    def fn(world):
        mesh, stage = DeviceMesh(world, pp=2), world.rank
        p = parameter(np.zeros(2 - stage), f"s{stage}", [[3.0, 4.0], [12.0]][stage])
        p.placements["pp"] = Held((stage,), mesh["pp"])
        return grad_norm([p], mesh)
    assert run_threads(2, fn) == [13.0, 13.0]


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}, {"dp": 3, "tp": 2},
                                   {"dp": 2, "pp": 2, "cp": 1, "tp": 2}], ids=str)
def test_norm_on_a_mesh_is_the_norm_of_the_whole(sizes):
    rng = np.random.default_rng(0)
    grads = {name: rng.standard_normal((5, 3)) for name in ("whole", "cut", "flat", "tied")}

    def fn(world, mutate=None):
        mesh = DeviceMesh(world, **sizes)
        params = {name: parameter(np.zeros((5, 3)), name) for name in grads}
        cut(params["cut"], "tp", Shard(0, parts(2), mesh["tp"]))
        cut(params["flat"], "dp", Flat((5, 3), mesh["dp"]))
        params["tied"].placements["pp"] = Held(tuple(range(mesh.sizes["pp"])), mesh["pp"])
        for name, p in params.items():
            g = grads[name]
            for placed in p.placements.values():
                g = placed.cut(g)
            p.grad = g
        return grad_norm(params.values(), mesh)

    n = math.prod(sizes.values())
    expected = math.sqrt(sum((g ** 2).sum() for g in grads.values()))
    found = run_threads(n, fn)
    assert len(set(found)) == 1 and found[0] == pytest.approx(expected, rel=1e-14)


def test_a_norm_that_counts_replicas_is_caught(monkeypatch):
    monkeypatch.setattr(placement, "owns", lambda p, mesh: True)
    with pytest.raises(AssertionError):
        test_norm_with_a_replicated_and_a_sharded_gradient()


def test_placements_say_what_they_are():
    def fn(comm):
        shard, flat = Shard(0, parts(2), comm), Flat((5,), comm)
        assert same(shard, replace(shard)) and same(flat, replace(flat))
        assert not same(shard, flat) and not same(shard, Shard(1, parts(2), comm))
        assert not same(Held((0,), comm), Held((0, 1), comm))
        return repr(flat)
    assert run_threads(2, fn) == ["Flat(shape=(5,))"] * 2


# --------------------------------------------------------- laid out again, and what is refused

@pytest.mark.parametrize("sizes", [dict(), dict(dp=2), dict(tp=3), dict(dp=2, tp=2),
                                   dict(dp=4, ep=2)], ids=str)
def test_lay_is_the_inverse_of_join(sizes):
    x = np.arange(20.0).reshape(5, 4)

    def fn(world):
        mesh, p = DeviceMesh(world, **sizes), parameter(x)
        cut(p, "tp", Shard(0, parts(mesh.sizes["tp"]), mesh["tp"]))
        cut(p, "pp", Held((0,), mesh["pp"]))
        p.sliced["dp"] = Flat(p.shape, mesh["dp"])
        for sliced in (False, True):
            assert np.array_equal(join(p, lay(p, x, sliced), sliced), x)
        assert np.array_equal(lay(p, x), p.data)
        cut(p, ("edp", "ep"), Flat(p.shape, mesh["edp", "ep"]))
        p.sliced.clear()
        return np.array_equal(lay(p, x), p.data) and np.array_equal(join(p, p.data), x)

    count = math.prod(size for axis, size in sizes.items() if axis != "ep")
    assert run_threads(count, fn) == [True] * count


@pytest.mark.parametrize("pp", [1, 2])
def test_everything_is_a_copy_with_one_stage_as_with_two(pp):
    def body(comm):
        p = parameter(np.arange(3.0))
        whole = placement.everything([p], DeviceMesh(comm, pp=pp))
        p.data += 1
        assert whole["w"].tolist() == [0, 1, 2]
    run_threads(pp, body)


def test_pieces_join_without_their_padding_too():
    def fn(comm):
        flat = Flat((5,), comm)
        return flat.join(np.arange(5.0)[flat.mine]).tolist()
    assert run_threads(4, fn) == [[0, 1, 2, 3, 4]] * 4


@pytest.mark.parametrize("sizes", [dict(dp=4, ep=2), dict(dp=2, ep=2), dict(dp=2, ep=1),
                                   dict(dp=4, ep=2, tp=2)], ids=str)
def test_the_gradient_of_an_expert_is_summed_over_edp_alone(sizes):
    """Two experts; each rank's part is 10 to the power of its number."""
    def fn(world):
        mesh, p, w = DeviceMesh(world, **sizes), parameter(np.zeros((2, 1)), "e"), parameter([0.0])
        cut(p, "ep", Shard(0, np.array_split(np.arange(2), mesh["ep"].size), mesh["ep"]))
        for one in (p, w):
            placement.mark_partial(one, mesh["dp"])
            one.grad = np.full(one.shape, 10.0 ** mesh.coords["dp"])
        finalize([p, w], mesh, 1)
        mine = [10.0 ** (mesh.coords["ep"] + mesh["ep"].size * i) for i in range(mesh["edp"].size)]
        assert np.all(p.grad == sum(mine)) and p.partial <= {"edp", "dp"}
        assert w.grad == sum(10.0 ** i for i in range(mesh.sizes["dp"]))
        whole = join(p, p.grad)
        assert grad_norm([p], mesh) == pytest.approx(np.linalg.norm(whole), rel=1e-14)
        return True
    assert all(run_threads(math.prod(s for axis, s in sizes.items() if axis != "ep"), fn))


def test_a_missing_gradient_is_zeros_of_the_piece():
    """Held by two stages, cut flat over dp for the optimizer, no gradient on stage 1."""
    x = np.arange(5.0)

    def fn(world):
        mesh = DeviceMesh(world, pp=2, dp=2)
        p = parameter(x, grad=None if mesh.coords["pp"] else x + mesh.coords["dp"])
        p.placements["pp"] = Held((0, 1), mesh["pp"])
        p.sliced["dp"] = Flat(p.shape, mesh["dp"])
        p.partial.update(("dp", "pp"))
        finalize([p], mesh, 1)
        return join(p, p.grad, sliced=True).tolist()
    assert run_threads(4, fn) == [(2 * x + 1).tolist()] * 4


def test_a_missing_gradient_of_what_a_strategy_has_cut_already():
    def fn(world):
        mesh = DeviceMesh(world, dp=2, cp=2)
        p = parameter(np.zeros(5), grad=None if mesh.coords["cp"] else np.ones(3))
        p.sliced["dp"] = Flat(p.shape, mesh["dp"])
        p.partial.add("cp")
        finalize([p], mesh, 1)
        return p.grad.tolist()
    assert run_threads(4, fn) == [[1.0] * 3] * 4


@pytest.mark.parametrize("axes, words", [
    (("world",), "partial over world, which is no axis of DeviceMesh.pp=1, dp=2"),
    (("dp", "xp"), "partial over xp"), (("tp",), "cannot be partial over tp.*dim 0")])
def test_sums_that_cannot_be_are_refused_before_any_message(axes, words):
    def fn(world):
        mesh, p = DeviceMesh(world, dp=2, tp=2), parameter(np.ones(5))
        cut(p, "tp", Shard(0, parts(2), mesh["tp"]))
        p.grad = p.data.copy()
        with world.counting() as sent, pytest.raises(ValueError, match=words):
            finalize([partial(p, *axes)], mesh, 1)
        return sent.messages
    assert run_threads(4, fn) == [0] * 4


def test_two_cuts_over_one_axis_are_refused():
    def fn(world):
        mesh, p = DeviceMesh(world, dp=2, cp=2), parameter(np.ones(5))
        cut(p, ("dp", "cp"), Flat(p.shape, mesh["dp", "cp"]))
        with pytest.raises(ValueError, match="w is cut over cp already, it cannot be over cp too"):
            cut(p, "cp", Flat(p.shape, mesh["cp"]))
        return p.size
    assert run_threads(4, fn) == [2] * 4
