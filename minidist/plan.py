"""Plan: which techniques train a model on given cards, what each costs, and why others lose.

    does one layer fit?  ->  do P + G + O?  ->  and A?      the article's tree, with its numbers
    then every (dp, tp, cp, pp, ep, ZeRO, recomputation, micro-batch) that fits, by predicted time

On cards, what one holds is counted by the textbooks' formulas, in 16 bits, and what a step takes is
estimated, see minidist.estimate.  On a machine that --calibrate has measured, it is a GPT of
minidist, in float32, and what a rank holds is exact, see minidist.machine.

Run:    python -m minidist.plan --model gpt3 --cards 1024
        python -m minidist.plan --calibrate here.json
        python -m minidist.plan --preset mini --batch 8 --card here.json --try
Lesson: python -m lessons.plan
"""
from dataclasses import replace

from minidist import (
    BadInput, calibrate, estimate, files, machine, published, request, schedules, search,
    simulate, trial)
from minidist.ranks import environment, launch
from minidist.search import ROOM, size

LESSONS = {"dp": "dp", "tp": "tp", "sp": "sp", "cp": "cp", "pp": "pp", "v": "schedules",
           "ep": "ep", "zero": "zero", "again": "recompute"}
WHERE = {"products": "products", "memory": "moving bytes in memory", "tp": "all_reduces of tp",
         "cp": "keys around cp", "ep": "tokens to experts", "bubble": "the bubble",
         "pp": "borders of stages", "dp": "gradients of dp"}


# ------------------------------------------------------------------------------ the tree

def tree(job, card, cards):
    """Walk the article's questions.  -> lines"""
    P, layer = job.parameters, job.parameters / job.L if job.experts else 12 * job.D ** 2
    own, kept = 16 * layer, card.kept(replace(job, B=1, rows=1))
    states, A = 16 * P, job.L * kept
    have = ROOM * card.memory
    yes = {True: "yes", False: "no"}
    lines = [f"A card has {size(card.memory)}, of which {ROOM:.0%} are planned with.",
             f"1. Does one layer fit? 16 bytes for each of {layer:,.0f} parameters, and what it "
             f"keeps of one row: {size(own)} + {size(kept)}: {yes[own + kept <= have]}",
             f"2. Do P + G + O? 16 x {P / 1e9:,.1f}e9 = {size(states)}: {yes[states <= have]}",
             f"3. And A, of one row: + {size(A)} = {size(states + A)}: {yes[states + A <= have]}"]
    if own + kept > have:
        lines.append("-> a layer must be cut: tensor parallelism inside a node (lessons.tp)")
    elif states + A <= have:
        lines.append("-> replicate: data parallelism, and mind the overlap (lessons.dp)")
    elif states / cards + A <= have:
        lines.append("-> hold P, G, O once over the replicas: ZeRO (lessons.zero); A as it is, or "
                     "recomputed (lessons.recompute)")
    else:
        lines.append("-> cut layers, stages or what is kept: tp in a node, pp between them, "
                     "recomputation (lessons.tp, lessons.pp, lessons.recompute)")
    return lines


# ------------------------------------------------------------------------------ what is shown

def told(took, job, card):
    """Describe the plan that was found.  -> lines"""
    held = card.held(job)
    rows = [f"plan       {job}",
            f"step       {took.all:.3g} s, MFU {estimate.mfu(job, card, took.all):.0%}: "
            + ", ".join(f"{WHERE[name]} {part:.3g} s" for name, part in took._asdict().items()
                        if part > 0.005 * took.all),
            "holds      " + ", ".join(f"{name} {size(n)}" for name, n in held._asdict().items())
            + f": {size(held.all)} of {size(card.memory)}",
            "sends      " + ", ".join(f"{axes} {size(n)}" for axes, n in card.sent(job).items()
                                      if n) + "; each card, in a step"]
    if job.pp > 1:
        idle = estimate.bubble(job)
        rows.append(f"bubble     (p-1)/(v m) = {idle:.1%} of the ideal, {idle / (1 + idle):.1%} of "
                    f"the total; m = {job.microbatches}")
    if job.dp > 1 and not job.hidden:
        rows.append(simulated(took, job))
    used = {"dp": job.dp > 1, "tp": job.tp > 1, "sp": job.sp, "cp": job.cp > 1, "pp": job.pp > 1,
            "v": job.v > 1, "ep": job.ep > 1, "zero": job.zero > 0, "again": job.again}
    shown = [f"lessons.{LESSONS[name]}" for name, is_used in used.items() if is_used]
    return rows + [f"see        {', '.join(shown) or 'lessons.step'}"]


def simulated(took, job):
    """Run the step on paper, gradients at its end and behind the last backward.  -> line"""
    made = schedules.make("interleaved" if job.v > 1 else "1f1b", job.pp, job.microbatches, job.v)
    each = took.working / job.microbatches / 3
    timeline = simulate.cost(made, each, each, each, took.pp / job.microbatches / 2 / job.v)
    late, early = (max(simulate.step(timeline, took.dp, max(1, job.layers // job.v), overlap))
                   for overlap in (False, True))
    return (f"simulated  {late:.3g} s on {job.cards} cards; {early:.3g} s if gradients leave layer "
            "by layer during the last backward")


def lost(took, best):
    """Say where a plan loses most against the best one."""
    worse = {name: getattr(took, name) - getattr(best, name) for name in WHERE}
    most = max(worse, key=worse.get)
    return f"+ {took.all - best.all:.3g} s: {WHERE[most]} + {worse[most]:.3g} s"


# ------------------------------------------------------------------------------ the command

def main():
    args = request.parser().parse_args()
    if (args.calibrate or args.tried) and environment.launched():
        raise BadInput("what is measured starts its own ranks; leave out -n and mpirun")
    files.ready(args.json, args.calibrate)
    if environment.rank() != 0:
        return 0
    if args.published:
        print(*published.lines("a100"), "", *published.lines("h100"), sep="\n")
        return 0
    return calibrated(args) if args.calibrate else planned(args)


def calibrated(args):
    """Measure this machine, show and write it.  -> status"""
    found = calibrate.measure(args.cards or 2)
    print(*calibrate.told(found), sep="\n")
    return files.deliver(("machine", args.calibrate, files.numbers(machine.written(found))))


def planned(args):
    """Search, and show what was found and what lost.  -> status"""
    on = request.card(args)
    cards = args.cards or (on.ranks if on.counted else None)
    if args.tried and not (on.counted and args.preset):
        raise BadInput("--try takes steps on the machine at hand; give it --preset, and --card as "
                       "--calibrate has written it")
    if not cards:
        raise BadInput("say how many cards there are: --cards 8")
    job = request.model(args)
    print(*tree(job, on, cards), "", sep="\n")
    found = search.plans(job, on, cards)
    best, *others = found
    print(*told(*best, on), sep="\n")
    for took, each in others[:3]:
        print(f"instead    {each}: {lost(took, best[0])}")
    if args.tried:
        print(*trial.compare(search.search(job, on, cards)[0], args.preset), sep="\n")
    return files.deliver(("data", args.json, files.numbers([
        dict(plan=str(each), seconds=took._asdict(), held=on.held(each)._asdict(),
             mfu=estimate.mfu(each, on, took.all)) for took, each in found])))


if __name__ == "__main__":
    launch.run(main)
