"""Compressed gradients: what arrives, what is kept for later, what it costs; on all ranks alike."""
import numpy as np
import pytest

from minidist import BadInput, compress, cost, parallel
from minidist import train as train_command
from minidist.buckets import Bucket
from minidist.collectives import choice
from minidist.dp import DistributedDataParallel
from minidist.engine.data import random_batch
from minidist.engine.nn import Parameter, digest
from minidist.engine.optim import SGD, AdamW
from minidist.mesh import DeviceMesh
from minidist.placement import grad_norm
from minidist.ranks.comm import run_threads
from minidist.step import train_step
from tests.models import tiny

FORMS = ["fp16", "1bit", "topk:0.1", "topk:1", "powersgd:1", "powersgd:3"]
SHAPES = [(7, 12), (5,), (16, 9), (), (3, 1), (0,)]


def bucket_of(gradients):
    """A bucket that holds these gradients, None for a parameter that has none."""
    params = [Parameter(np.zeros(shape), f"p{i}") for i, shape in enumerate(SHAPES)]
    bucket = Bucket(params)
    bucket.open()
    for p, g in zip(params, gradients):
        if g is not None:
            p.grad = g.copy()
            bucket.deliver(p)
    bucket.close()
    return bucket


def draw(rank, step, scale=1.0):
    rng = np.random.default_rng([rank, step])
    return [scale * rng.standard_normal(shape) for shape in SHAPES]


def sums(comm, form, steps, gradients=draw):
    """Sum `steps` buckets.  -> what arrived each time [steps, n], what is left here, messages"""
    sender, found = compress.make(form), []
    with comm.counting() as counted:
        for step in range(steps):
            bucket = bucket_of(gradients(comm.rank, step))
            sender(bucket, comm)
            found.append(bucket.flat[:-len(SHAPES)].copy())
    [left] = sender.left.values()
    owed = getattr(sender, "owed", {"": np.zeros(0)})
    return np.array(found), left, *owed.values(), counted


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_lost_only_late(form, p):
    """What has arrived and what every rank still owes make up the sum of all gradients."""
    ranks = run_threads(p, sums, form, 5)
    arrived, left, owed, _ = zip(*ranks)
    assert all(np.array_equal(arrived[0], other) for other in arrived), "ranks differ"
    true = sum(np.concatenate([g.reshape(-1) for g in draw(rank, step)])
               for rank in range(p) for step in range(5))
    late = sum(left)
    if form == "1bit":
        late = late + np.concatenate(owed)
    near = 0.1 if form == "fp16" else 1e-12         # the sum itself is rounded to 16 bits
    np.testing.assert_allclose(arrived[0].sum(0) + late, true, atol=near)
    if form == "topk:1":
        assert not np.any(late)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_those_of_the_formula(form, p):
    name, _, number = form.partition(":")
    for rank, (*_, counted) in enumerate(run_threads(p, sums, form, 2)):
        group = cost.Group(p, rank, lambda *size: choice.chosen(*size))
        price = cost.compressed(name, SHAPES, group, 8, float(number) if number else None)
        assert (counted.messages, counted.bytes) == (2 * price.messages, 2 * price.bytes)


# ------------------------------------------------------------------ by hand

def test_feedback_sends_a_small_gradient_in_the_end():
    """A quarter is rounded to 0 three times, and the fourth, with what was left, to 1."""
    left, arrived = np.zeros(1), []

    def whole_numbers(x):
        return np.floor(x), 2 * np.floor(x)               # another rank has sent the same

    for _ in range(9):
        arrived.append(compress.feedback(np.array([0.25]), left, whole_numbers)[0])
    assert arrived == [0, 0, 0, 2, 0, 0, 0, 2, 0] and left[0] == 0.25


def test_signs_and_sizes_by_hand():
    bits, sizes = compress.signs(np.array([3.0, -1, -5, 0]), np.array([0, 0, 1, 1]), 3)
    assert bits.tolist() == [False, True, True, False] and sizes.tolist() == [2, 2.5, 0]
    text = np.packbits(bits)
    assert text.nbytes == 1 and compress.unpacked(text, sizes[[0, 0, 1, 1]]).tolist() == [
        2, -2, -2.5, 2.5]


def test_the_largest_and_their_sum_by_hand():
    assert compress.largest(np.array([1.0, -7, 0, 3, -2]), 3).tolist() == [1, 3, 4]
    total = compress.merged(np.array([[1.0, 2], [10, 20]]), np.array([[0, 3], [3, 1]]), 5)
    assert total.tolist() == [1, 20, 0, 12, 0]
    assert (cost.kept(1000, 0.01), cost.kept(5, 0.01), cost.kept(5, 1)) == (10, 1, 5)


def test_a_product_of_low_rank_arrives_whole():
    """PowerSGD leaves nothing out of what has its rank."""
    def low(rank, step):
        made = draw(0, step)
        made[2] = np.outer(made[2][:, 0], made[2][0])
        return made

    arrived, left, *_ = run_threads(1, sums, "powersgd:1", 1, low)[0]
    bucket = bucket_of(low(0, 0))
    np.testing.assert_allclose(arrived[0][bucket.columns["p2"]], low(0, 0)[2].reshape(-1))
    assert np.abs(left[bucket.columns["p2"]]).max() < 1e-12
    q = compress.orthogonal(np.random.default_rng(0).standard_normal((9, 4)))
    np.testing.assert_allclose(q.T @ q, np.eye(4), atol=1e-14)
    assert not compress.orthogonal(np.zeros((3, 2))).any()


def test_sixteen_bits_do_not_overflow():
    """Each rank's share, and their sum, fit: 4 ranks with gradients of a million."""
    arrived = run_threads(4, sums, "fp16", 1, lambda rank, step: [
        np.full(shape, 1e6) for shape in SHAPES])[0][0]
    np.testing.assert_allclose(arrived, 4e6, rtol=1e-3)
    assert not np.any(run_threads(2, sums, "fp16", 1, lambda rank, step: [
        np.zeros(shape) for shape in SHAPES])[0][0])


# ------------------------------------------------------------------ parameters without a gradient

@pytest.mark.parametrize("form", FORMS)
def test_what_has_no_gradient_anywhere_keeps_its_rest(form):
    def sometimes(rank, step):
        made = draw(rank, step)
        if step == 1:
            made[2] = None                                  # nowhere
            if rank:
                made[0] = None                              # on one rank only
        return made

    def fn(comm):
        sender, rests = compress.make(form), []
        for step in range(2):
            bucket = bucket_of(sometimes(comm.rank, step))
            sender(bucket, comm)
            [left] = sender.left.values()
            rests.append(left[bucket.columns["p2"]].copy())
        bucket.hand_out()
        return rests, [p.grad is None for p in bucket.params]

    for (before, after), none in run_threads(2, fn):
        assert np.array_equal(before, after)
        assert none == [False, False, True, False, False, False]


# ------------------------------------------------------------------ training

def train(world, form, steps=4, make=None, microbatches=2):
    """-> digest, loss of the last step, gradient norm; the same on all ranks"""
    mesh = DeviceMesh(world, dp=world.size)
    model = DistributedDataParallel(tiny(), mesh["dp"], bucket_bytes=4000)
    if form:
        compress.use(model, form)
    optimizer = (make or (lambda params: AdamW(params, 0.01)))(model.parameters())
    for step in range(steps):
        loss = train_step(model, random_batch(13, 6, 4, 0, step), optimizer, mesh, microbatches,
                          max_norm=1.0).loss
        norm = grad_norm(model.parameters(), mesh)
    return digest(model), loss, norm


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_ranks_stay_equal_bit_by_bit(form, p):
    ranks = run_threads(p, train, form)
    assert len({digest for digest, *_ in ranks}) == 1
    same = ranks[0][0] == run_threads(p, train, None)[0][0]
    assert same == (form == "topk:1")


@pytest.mark.parametrize("make", [None, lambda params: SGD(params, 0.1, momentum=0.9)])
def test_all_of_the_largest_is_the_plain_sum(make):
    for (_, loss, norm), (_, plain, true) in zip(run_threads(2, train, "topk:1", 4, make),
                                                 run_threads(2, train, None, 4, make)):
        np.testing.assert_allclose((loss, norm), (plain, true), rtol=1e-11)


def test_a_step_sends_as_often_whatever_its_passes():
    def fn(world, passes):
        with world.counting() as counted:
            train(world, "1bit", 2, microbatches=passes)
        return counted.by_group["dp"].bytes
    assert run_threads(2, fn, 1) == run_threads(2, fn, 3)


@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_that_is_no_number_is_refused(form):
    def fn(world):
        mesh = DeviceMesh(world, dp=2)
        model = compress.use(DistributedDataParallel(tiny(), mesh["dp"]), form)
        model.parameters()[0].data[0] = np.nan
        with pytest.raises(FloatingPointError):
            train_step(model, random_batch(13, 6, 4, 0, 0), SGD(model.parameters(), 0.1), mesh)
    run_threads(2, fn)


@pytest.mark.parametrize("form, words", [
    ("fp8", "there is no compression"), ("fp16:2", "no compression"), ("topk:0", "above 0"),
    ("topk:x", "above 0"), ("topk:1.5", "above 0"), ("powersgd:0", "whole number"),
    ("powersgd:1.5", "whole number"), ("topk:", "above 0")])
def test_what_cannot_be_is_one_sentence(form, words):
    with pytest.raises(BadInput, match=words):
        compress.make(form)


def test_the_first_steps_may_be_plain():
    """As many steps as said are the plain sum, bit by bit; the next one is not."""
    def fn(world, form, after, steps):
        mesh = DeviceMesh(world, dp=2)
        model = DistributedDataParallel(tiny(), mesh["dp"], bucket_bytes=4000)
        if form:
            compress.use(model, form, after)
        optimizer = SGD(model.parameters(), 0.1)
        for step in range(steps):
            train_step(model, random_batch(13, 6, 4, 0, step), optimizer, mesh)
        return digest(model)

    assert run_threads(2, fn, "topk:0.1", 3, 3) == run_threads(2, fn, None, 0, 3)
    assert run_threads(2, fn, "topk:0.1", 3, 4) != run_threads(2, fn, None, 0, 4)


@pytest.mark.parametrize("argv, words", [
    ("--dp 2 --tp 2", "--tp hold parameters in common"), ("--dp 2 --zero 1", "in pieces"),
    ("--dp 2 --pp 2", "both ends"), ("--dp 2 --verify", "another training"),
    ("--dp 2 --save-every 2", "a checkpoint"), ("--dp 1", "there is 1"),
    ("--dp 2 --precision fp16", "overflow"), ("--dp 2 --cp 2", "another rest")])
def test_what_does_not_go_together_is_refused(argv, words):
    args = train_command.parser().parse_args(["--compress", "topk", *argv.split()])
    with pytest.raises(BadInput, match=words):
        parallel.axis_sizes(args, 4)
    with pytest.raises(BadInput, match="is not given"):
        parallel.axis_sizes(train_command.parser().parse_args(["--compress-after", "3"]), 1)
