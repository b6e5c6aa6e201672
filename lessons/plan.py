"""THE PLAN      Which technique, when, and in what order?

  lifts   all three   memory, compute, bandwidth: the plan says which wall comes first
  costs   nothing     but the estimate is only as good as the runs that it was tried on
  code    minidist/plan.py, minidist/estimate.py
  run     python -m lessons.plan
"""
import statistics
from dataclasses import replace

import numpy as np

from lessons import kit
from minidist import cost, estimate, plan, published, search
from minidist.estimate import CARDS, Job
from minidist.request import MODELS

EXERCISE = [estimate.held, estimate.bubble, estimate.sent_to_replicas]
ALONE = True
A100, RUNS = CARDS["a100"], published.RUNS["a100"]
ONE = Job(17, 2176, 17, 50257, 2048, 512)             # 1.1B parameters
ASKED = [("1B on 8", ONE, 8), ("70B on 64", MODELS["llama3-70b"], 64),
         ("175B on 1024", MODELS["gpt3"], 1024)]


def the_tree(lesson):
    """Does it fit?

    The article's questions, for a model on so many A100s: does one layer fit, do P + G + O, does A
    of one row? What fails first says what must be cut first."""
    lesson.predict("175B parameters of 16 bytes each: how many cards of 80 GB for P, G and O?", 35,
                   "cards", why="2.79 TB / 80 GB", mistakes={
                       5: "2 bytes are the parameters alone", 70: "16 bytes, not 32"})
    rows = []
    for name, job, cards in ASKED:
        one = replace(job, rows=1)
        layer = 16 * 12 * job.D ** 2 + cost.textbook_activations(one.sizes)
        states, kept = 16 * job.parameters, job.L * cost.textbook_activations(one.sizes)
        rows.append([name, search.size(layer), search.size(states), search.size(states + kept),
                     plan.tree(job, A100, cards)[-1][3:].partition(":")[0]])
    lesson.table(["model", "one layer", "P + G + O", "and A", "so"], rows)


def the_search(lesson):
    """Which plan is fastest, and why do the others lose?

    Every (dp, tp, pp, ZeRO, recomputation, rows) that fits in 72 of 80 GB, by estimated step."""
    lesson.predict("GPT-3 on 1024 cards, 8 a node: on how many is each layer cut?", 4, "cards",
                   why="with tp=8 the all_reduces cost more than the shorter pipeline saves",
                   mistakes={8: "as in the papers; here 0.3 s slower", 1: "it does not fit"})
    for name, job, cards in ASKED:
        (best, first), *others = search.plans(job, A100, cards)
        held = estimate.held(first)
        lesson.say(f"{name}: {first}")
        lesson.say(f"   {best.all:.3g} s, MFU {estimate.mfu(first, A100, best.all):.0%}, holds "
                   f"{search.size(held.all)}, {search.size(held.A)} of it A")
        for took, other in others[1:3]:
            lesson.fill(f"   not {other}: {plan.lost(took, best)}", "     ")


def heavy_traffic(lesson):
    """What if gradients are too much traffic?

    Three answers, for 1B parameters on 8 cards, each in a node of its own: hide them behind the
    backward, send less of them, or put the cards where the wire is fast."""
    job = replace(ONE, dp=8, rows=1)
    took = replace(A100, network=1.25e9).seconds(job)
    back = 2 / 3 * (took.products + took.memory)
    fast = replace(A100, network=A100.node).seconds(job)
    shapes = [(4 * ONE.D, ONE.D)] * (3 * ONE.L)
    plain = cost.Group(8).all_reduce(sum(a * b for a, b in shapes), 4).bytes
    lesson.predict("8 cards on 10 Gbit/s, 4.4 GB of gradients: how long must a backward be to hide "
                   "them?", 6.1, "s", why="2 (7/8) 4.3 GB / 1.25 GB/s", mistakes={
                       3.5: "an all_reduce sends twice", 7: "7/8 of it twice"})
    lesson.table(["answer", "a step", "of it visible"], [
        ["as it is, on 10 Gbit/s", f"{took.all:.2f} s", f"{took.dp:.2f} s"],
        ["overlap: behind the backward", f"{took.all - min(back, took.dp):.2f} s",
         f"{took.dp - min(back, took.dp):.2f} s"]] + [
        [f"compression: {form}:{number}", f"{took.all - took.dp * (1 - share):.2f} s",
         f"{took.dp * share:.2f} s"]
        for form, number in (("topk", 0.01), ("powersgd", 16))
        for share in [cost.compressed(form, shapes, cost.Group(8), 4, number).bytes / plain]] + [
        ["topology: all in one node", f"{fast.all:.2f} s", f"{fast.dp:.3f} s"]])
    lesson.say("""
        Overlap costs nothing and comes first. Compression is another training (lessons.compress).
        Topology decides which axis gets the fast wire (lessons.mesh).""")


def prove(lesson):
    """Is the estimate any good?

    Memory and bytes against the closed forms of other lessons; then three shares of an A100's
    figures, fitted to every second of 21 published steps, and tried on the rest."""
    worst = {}
    for job in layouts():
        for name, found, wanted in compared(job):
            worst[name] = max(worst.get(name, 0), kit.difference(np.array(found), np.array(wanted)))
    for name, error in worst.items():
        lesson.check(name, error, 1e-12)
    errors = [abs(A100.seconds(run.job).all / run.seconds - 1)
              for run in RUNS[1::2]]
    lesson.check("published steps, median", statistics.median(errors), 0.10)
    lesson.check("published steps, worst", max(errors), 0.25)
    j = Job(96, 12288, 96, 51200, 2048, 64, tp=8, pp=8, v=3)
    lesson.ledger(("A of 175B, first stage", "(10 + 24/t + 5 H T/(D t)) T D (L + L (p-1)/(p v))",
                   None, round(estimate.held(j).A)), t=8, H=96, T=2048, D=12288, L=96, p=8, v=3)
    lesson.figure(draw)


def layouts():
    """Jobs that differ in all that a card's memory and traffic depend on."""
    base = Job(6, 96, 6, 500, 64, 48, rows=2)
    yield base
    for zero in (0, 1, 2, 3):
        yield replace(base, dp=4, zero=zero, again="blocks")
        yield replace(base, dp=3, tp=2, rows=1, zero=zero)
        yield replace(base, dp=4, cp=2, ep=4, tp=2, zero=zero, experts=2e5, k=2)
    for pp, v, rows, B in ((2, 1, 1, 8), (3, 2, 2, 24), (3, 1, 2, 4), (2, 3, 1, 6)):
        yield replace(base, pp=pp, v=v, rows=rows, B=B, tp=2)
        yield replace(base, pp=pp, v=v, rows=rows, B=B, tp=3, sp=True, again="attention", count=7e5)


def compared(job):
    """What is estimated, and the same from other lessons' formulas.  -> (name, found, wanted)"""
    held, m = estimate.held(job), job.B // (job.dp * job.rows)
    part, replicas = job.tp * job.pp, job.dp * job.cp
    alike, apart = (job.parameters - job.experts) / part, job.experts / part / job.ep
    mine = alike + apart
    gathered = 2 * mine / job.L if job.zero == 3 else 0
    yield "P + G + O", held.P + held.G + held.O - gathered, (
        cost.zero_memory(alike, replicas, job.zero)
        + cost.zero_memory(apart, replicas // job.ep, job.zero))
    own = alike / replicas + apart / (replicas / job.ep)
    yield "P; O", [held.P - gathered, held.O], [2 * (own if job.zero == 3 else mine),
                                                12 * (own if job.zero else mine)]
    one = cost.textbook_activations(job.sizes, job.tp, job.sp, job.again) * job.L / job.pp
    alive = min(job.pp, m) * (1 if job.v == 1 else 1 + (job.pp - 1) / (job.pp * job.v))
    scores = 4 * job.rows * job.T * job.V / job.tp if job.pp == 1 else 0
    again = 34 * job.rows * job.T * job.D / job.tp if job.again == "blocks" else 0
    yield "A", held.A, (alive * one + scores + again) / job.cp
    yield "bubble of the ideal", estimate.bubble(job), (job.pp - 1) / job.v / m
    twice = {0: 8, 1: 6, 2: 6 * m, 3: 8 * m}[job.zero]
    yield "bytes to replicas", estimate.sent_to_replicas(job), twice * (mine - own)


@kit.breaks(estimate, "held")
def no_activations(job, state=(2, 2, 12)):
    """Memory without activations: the plan fits on paper, and runs out of memory in its first step.

    "16 bytes per parameter" is what most tables show, and a fifth of what a long row needs."""
    return no_activations.original(job, state)._replace(A=0.0)


@kit.breaks(estimate, "bubble")
def of_the_total(job):
    """The bubble of the total where that of the ideal is asked for: (p-1)/(v m + p-1).

    The step looks shorter the deeper the pipeline is; half of the texts print one for the other."""
    idle = of_the_total.original(job)
    return idle / (1 + idle)


def draw(figure):
    axes = figure.subplots()
    for name, some in ("fitted", RUNS[::2]), ("tried", RUNS[1::2]):
        axes.loglog([run.seconds for run in some],
                    [A100.seconds(run.job).all for run in some], "o", label=name)
    axes.plot([1, 120], [1, 120], "k-", lw=0.5)
    axes.set(xlabel="measured and published (s)", ylabel="estimated (s)", title="steps on A100")
    axes.legend()


TAKEAWAY = "Ask what runs out first; cut that, and pay where there is most left."
FIELD = ("Calculon, vTrain, llm-analysis; Megatron's theoretical_memory_usage; the scaling book's "
         "rooflines")
TRY = ["python -m minidist.plan --model llama3-405b --cards 8192 --card h100: what fills a card?",
       "python -m minidist.plan --calibrate here.json; --preset mini --batch 8 --card here.json "
       "--try: is the plan that comes first the fastest on your machine?"]
SCREENS = [the_tree, the_search, heavy_traffic, prove, no_activations]

if __name__ == "__main__":
    kit.run(SCREENS)
