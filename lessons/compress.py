"""COMPRESSION      May a gradient be sent in a tenth of its bytes?

  lifts   bandwidth   gradients in half to a fiftieth of the bytes
  costs   compute     to find what to send; memory for the rest; and it is another training
  code    minidist/compress.py, minidist/buckets.py
  run     mpirun -n 4 python -m lessons.compress    or: python -m lessons.compress -n 4
"""
from functools import cache

import numpy as np

from lessons import clock, kit, owed, setting
from minidist import compress, cost
from minidist.buckets import Bucket
from minidist.dp import DistributedDataParallel
from minidist.engine.nn import Parameter
from minidist.ranks.comm import run_threads
from minidist.step import train_step

EXERCISE = [compress.feedback, compress.merged]
FORMS = ["fp16", "1bit", "topk:0.01", "powersgd:2"]
GPT_1B, RANKS = [(8192, 2048), (2048, 8192)] * 30, 8          # one of its buckets, if need be
STEPS = 12


def what_is_left_out(lesson):
    """What happens to what is not sent?

    Somebody sends whole numbers only. A gradient of 0.25, step after step, is always rounded away,
    unless what was left out is added to the next one: error feedback."""
    lesson.predict("Ten steps of 0.25, rounded down with feedback: what has arrived?", 2, "",
                   why="2.5 rounded down; the rest waits", mistakes={
                       0: "that is without feedback", 2.5: "only whole numbers travel"})
    left, rows, sums = np.zeros(1), [], [0.0, 0.0]
    for step in range(10):
        sums[0] += np.floor(0.25)
        sums[1] += compress.feedback(np.array([0.25]), left, lambda x: (np.floor(x),) * 2)[0]
        if step in (2, 3, 6, 7, 9):
            rows.append([step + 1, (step + 1) * 0.25, *sums, left[0]])
    lesson.table(["steps", "true sum", "arrived, without", "with feedback", "left out now"], rows)
    lesson.say("""
        With it nothing is lost, only late: arrived + left out = true, at every step.""")


def four_forms(lesson):
    """How much is sent, and how much is left out?

    Four ways to sum a bucket of DistributedDataParallel. Sent: by one of 8 ranks, for 1B
    parameters. Left out: of a gradient of random numbers, the worst case, in its first step."""
    lesson.source(compress.TopK.send, "places =", "return")
    n = sum(a * b for a, b in GPT_1B)
    lesson.predict("topk sends a number of 4 bytes and its place, 4 more. Of 8 ranks, up to which "
                   "share of the numbers does it send less than the plain sum?", 12.5, "%",
                   why="(p-1) k 8 against 2(p-1)/p 4 n: k/n < 1/p", mistakes={
                       50: "places differ from rank to rank: gathered, not summed"})
    plain = cost.Group(RANKS).all_reduce(n, 4).bytes
    rows = [["plain sum", kit.size(plain), "1.0", "0 %", ""]]
    for form in FORMS:
        name, _, number = form.partition(":")
        sent = cost.compressed(name, GPT_1B, cost.Group(RANKS), 4, float(number or 0)).bytes
        rows.append([form, kit.size(sent), f"{plain / sent:.1f}", f"{left_out(form):.0%}",
                     kit.duration(lesson.share(lambda form=form: seconds(form)))])
    lesson.table(["form", "sent per step", "times less", "left out", "computing, of 1M"], rows)


def left_out(form):
    """The share of a random gradient, by its square, that one rank does not send."""
    sender, bucket = compress.make(form), filled(np.random.default_rng(0).standard_normal(3000))
    size = np.square(bucket.flat[:-1]).sum()
    run_threads(1, lambda comm: sender(bucket, comm))
    return np.square(sender.left["x"]).sum() / size


def seconds(form):
    """Time to compress a million numbers, on one rank."""
    sender = compress.make(form)
    bucket = filled(np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32))
    return run_threads(1, lambda comm: clock.best(lambda: sender(bucket, comm), 2))[0]


def filled(x):
    """A bucket that holds one square gradient, or nearly."""
    n = int(x.size ** 0.5)
    p = Parameter(np.zeros((n, n), x.dtype), "x")
    bucket = Bucket([p])
    bucket.open()
    p.grad = x[:n * n].reshape(n, n)
    bucket.deliver(p)
    return bucket


def does_it_train(lesson):
    """Does it train?

    A small GPT on two ranks, the same batches and rate: its loss, with feedback and without."""
    lines = lesson.share(losses)
    plain = lines["plain sum"][-1]
    lesson.table(["form", f"loss after {STEPS} steps", "without feedback"],
                 [["plain sum", f"{plain:.3f}", ""]] + [
                     [form, f"{lines[form][-1]:.3f}", f"{lines[form + ' '][-1]:.3f}"]
                     for form in FORMS])
    lesson.say("""
        It is another training: what arrives late was computed for older weights. AdamW suffers
        most: it divides by a size that it learns from what arrives, so that 1-bit Adam, say,
        begins with plain sums and compresses its momentum later.""")
    lesson.figure(draw, lines)


@cache
def losses():
    """-> {form: loss of each step}, a blank behind the forms without feedback"""
    found = {"plain sum": run_threads(2, trained, None, True)[0]}
    for form in FORMS:
        found[form] = run_threads(2, trained, form, True)[0]
        found[form + " "] = run_threads(2, trained, form, False)[0]
    return found


def trained(comm, form, remembers):
    mesh = setting.mesh(comm, "dp")
    model = DistributedDataParallel(setting.model(layers=2), mesh["dp"])
    if form:
        compress.use(model, form)
    optimizer, found = setting.SGD(model.parameters(), lr=0.5), []
    for _ in range(STEPS):
        found.append(train_step(model, setting.words(4, 0), optimizer, mesh, max_norm=1.0).loss)
        if form and not remembers:
            model.compressor.left.clear()
    return found


def prove(lesson):
    """Is nothing lost, and what is sent?

    What has arrived and what all ranks still owe, against the sum of all gradients; every rank has
    the same bits. Then the bytes of two buckets, of whose numbers topk sends k each."""
    comm = lesson.comm
    for form in ["1bit", "topk:0.1", "powersgd:2"]:
        arrived, waiting, true, counted = owed.sums(comm, form)
        lesson.check(f"{form}: arrived + owed = all",
                     kit.difference(arrived + waiting, true), 1e-12)
        others = np.array(lesson.collect(arrived.sum(-1).tolist()))
        lesson.check(f"{form}: the same on every rank", np.ptp(others))
        if form == "topk:0.1":
            topk = counted.by_label["all_gather"].bytes
    lesson.check("feedback: what is sent, kept, left alone", owed.by_hand())
    lesson.ledger(("topk: numbers, places", "2 (p-1) k (8 + 4)", None, topk),
                  p=comm.size, k=cost.kept(owed.NUMBERS, 0.1))


@kit.breaks(compress, "feedback")
def forgotten(x, left, send):
    """What is left out is forgotten.

    A gradient that is small in every step never arrives, and the loss looks fine for a while."""
    return send(x)[1]


@kit.breaks(compress, "merged")
def places_of_rank_0(numbers, places, n):
    """The numbers of all ranks are put where rank 0's belong.

    The sum has the right size and the wrong places: all ranks agree, and all are wrong."""
    return places_of_rank_0.original(numbers, np.broadcast_to(places[0], places.shape), n)


@kit.breaks(compress, "summed")
def own_directions(arrays, comm):
    """PowerSGD's factors are not summed: each rank keeps to the directions of its own gradient.

    Every rank's loss falls, and they are no replicas any more."""
    return arrays


def draw(figure, lines):
    axes = figure.subplots()
    for name, values in lines.items():
        axes.plot(values, "--" if name.endswith(" ") else "-", lw=1,
                  label=None if name.endswith(" ") else name)
    axes.set(xlabel="step", ylabel="loss", title="with feedback; dashed: without")
    axes.legend()


TAKEAWAY = "Send what is large now and the rest later; worth it where the wire is the wall."
FIELD = ("torch DDP comm hooks (fp16, PowerSGD); DeepSpeed 1-bit Adam; Horovod's fp16; deep "
         "gradient compression")
TRY = ["at which bandwidth does topk:0.01 cost more time than it saves, on this machine?",
       "--compress powersgd:16 with minidist.train --preset nano: which rank is enough?"]
SCREENS = [what_is_left_out, four_forms, does_it_train, prove, forgotten]

if __name__ == "__main__":
    kit.run(SCREENS)
