"""Plan: which techniques train a model on given cards, what each costs, and why others lose.

    does one layer fit?  ->  do P + G + O?  ->  and A?      the article's tree, with its numbers
    then every (dp, tp, pp, ZeRO, recomputation, micro-batch) that fits, by predicted step time

What a card holds is counted by the textbooks' formulas, in 16 bits; what a step takes is estimated,
see minidist.estimate.  Sequences are not cut (cp), and there are no experts.

Run:    python -m minidist.plan --model gpt3 --cards 1024
Lesson: python -m lessons.plan
"""
from collections import Counter
from dataclasses import replace

from minidist import BadInput, estimate, files, flags
from minidist.estimate import CARDS, Job
from minidist.ranks import environment, launch

MODELS = {
    "gpt3": Job(L=96, D=12288, H=96, V=50257, T=2048, B=1536),
    "llama3-8b": Job(L=32, D=4096, H=32, V=128256, T=8192, B=512, count=8.03e9),
    "llama3-70b": Job(L=80, D=8192, H=64, V=128256, T=8192, B=1024, count=70.55e9),
    "llama3-405b": Job(L=126, D=16384, H=128, V=128256, T=8192, B=2048, count=405.85e9)}
ROOM = 0.9                          # of a card's memory: buffers and fragments take the rest
LESSONS = {"dp": "dp", "tp": "tp", "sp": "sp", "pp": "pp", "v": "schedules", "zero": "zero",
           "again": "recompute"}
WHERE = {"products": "products", "memory": "moving bytes in memory", "tp": "all_reduces of tp",
         "bubble": "the bubble", "pp": "borders of stages", "dp": "gradients of dp"}


# ------------------------------------------------------------------------------ the request

def parser():
    p = flags.Parser(prog="python -m minidist.plan", description=__doc__.split("\n")[0],
                     epilog="example: python -m minidist.plan --model gpt3 --cards 1024")
    p.add_argument("--model", choices=MODELS, help="sizes of a published one")
    p.add_argument("--params", type=flags.real(1e6), metavar="N",
                   help="or a GPT of about N parameters (7e9), 128 times as wide as it has layers")
    for name, text in (("layers", "L"), ("width", "D"), ("heads", "H"), ("vocab", "V"),
                       ("context", "T")):
        p.add_argument("--" + name, type=flags.integer(1, 10 ** 7), metavar=text,
                       help="replace the model's")
    p.add_argument("--batch", type=flags.integer(1), metavar="B", help="rows in a step")
    p.add_argument("--cards", type=flags.integer(1, 10 ** 6), metavar="N", help="how many")
    p.add_argument("--card", choices=CARDS, default="a100", help="default a100, with 80 GB")
    p.add_argument("--memory", type=flags.real(1), metavar="GB", help="replace the card's")
    p.add_argument("--per-node", type=flags.integer(1, 1024), default=8, metavar="N",
                   help="cards on the fast link (default 8)")
    p.add_argument("--published", action="store_true",
                   help="show the estimate beside steps that were measured and published")
    p.add_argument("--json", metavar="FILE", help="write the plans as data")
    return p


def model(args):
    """Read which model it is about.  -> Job on one card; BadInput"""
    shape = args.layers and args.width
    if [bool(args.model), bool(args.params), bool(shape and not args.model)].count(True) != 1:
        raise BadInput("say which model: --model gpt3, --params 7e9, or --layers and --width; "
                       "one of them")
    job = MODELS.get(args.model)
    if job is None:
        layers = args.layers or max(1, round((args.params / 12 / 128 ** 2) ** (1 / 3)))
        width = args.width or 128 * layers
        job = Job(layers, width, max(1, width // 128), 50257, 2048, 512)
    given = {"L": args.layers, "D": args.width, "H": args.heads, "V": args.vocab,
             "T": args.context, "B": args.batch}
    changed = {name: value for name, value in given.items() if value}
    if changed.keys() & {"L", "D", "V"}:
        changed["count"] = 0
    job = replace(job, **changed)
    if job.D % job.H:
        raise BadInput(f"{job.H} heads do not divide a width of {job.D}; use other --heads")
    return job


# ------------------------------------------------------------------------------ the tree

def tree(job, card, cards):
    """Walk the article's questions.  -> lines"""
    P, layer = job.parameters, 12 * job.D ** 2
    own, kept = 16 * layer, estimate.cost.textbook_activations(replace(job, rows=1).sizes)
    states, A = 16 * P, job.L * kept
    have = ROOM * card.memory
    yes = {True: "yes", False: "no"}
    lines = [f"A card has {size(card.memory)}, of which {ROOM:.0%} are planned with.",
             f"1. Does one layer fit? 16 bytes for each of {layer:,} parameters, and what it keeps "
             f"of one row: {size(own)} + {size(kept)}: {yes[own + kept <= have]}",
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


# ------------------------------------------------------------------------------ the search

def candidates(job, cards, per_node):
    """Yield every way to spread a job over exactly so many cards that its sizes allow."""
    for tp in (n for n in powers(per_node) if job.H % n == 0 and cards % n == 0):
        for pp in (n for n in range(1, job.L + 1) if job.L % n == 0 and cards // tp % n == 0):
            dp = cards // tp // pp
            for rows in (1, 2, 4, 8, 16):
                if job.B % (dp * rows):
                    continue
                for zero in ((0, 1, 2, 3) if pp == 1 else (0, 1)) if dp > 1 else (0,):
                    for again in (None, "attention", "blocks"):
                        for v in chunks(job, pp, job.B // (dp * rows)):
                            yield replace(job, tp=tp, pp=pp, dp=dp, rows=rows, zero=zero,
                                          again=again, v=v, sp=tp > 1)


def powers(most):
    return (2 ** i for i in range(most.bit_length()))


def chunks(job, pp, microbatches):
    """Chunks per stage: one, or what interleaving allows."""
    each = job.L // pp
    return [1] + [v for v in (2, 3, 4) if pp > 1 and each % v == 0 and microbatches % pp == 0]


def search(job, card, cards, per_node):
    """Try all.  -> those that fit, fastest first [(Seconds, Job)]; the smallest that does not"""
    fits, smallest = [], None
    for each in candidates(job, cards, per_node):
        held = estimate.held(each).all
        if held <= ROOM * card.memory:
            fits.append((estimate.seconds(each, card), each))
        elif smallest is None or held < smallest[0]:
            smallest = held, each
    return sorted(fits, key=lambda pair: pair[0].all), smallest


def plans(job, card, cards, per_node):
    """Find the fastest plan, and the fastest of other kinds.  -> [(Seconds, Job)]; BadInput"""
    fits, smallest = search(job, card, cards, per_node)
    if not fits:
        raise BadInput(refusal(job, card, cards, per_node, smallest))
    seen, found = Counter(), []
    for took, each in fits:
        kind = each.tp, each.pp > 1, each.zero > 0, each.again
        if not seen[kind]:
            found.append((took, each))
        seen[kind] += 1
    return found


def refusal(job, card, cards, per_node, smallest):
    """Say by how much it does not fit, and what would be enough."""
    if smallest is None:
        return (f"{job.B} rows do not divide over {cards} cards in any way that {job.L} layers and "
                f"{job.H} heads allow; use another --batch or --cards")
    held, each = smallest
    short = (f"{job.parameters / 1e9:,.1f}e9 parameters do not fit on {cards} cards of "
             f"{size(card.memory)}: the smallest plan, {spelled(each)}, holds {size(held)} on one "
             f"card, {size(held - ROOM * card.memory)} too much")
    for times in (2, 4, 8, 16, 32, 64):
        if search(replace(job, B=job.B * times), card, cards * times, per_node)[0]:
            return f"{short}; use --cards {cards * times}, or cards with more --memory"
    return f"{short}; use many more --cards, or shorter rows (--context)"


# ------------------------------------------------------------------------------ what is shown

def size(n):
    """Write bytes.  2.8e12 -> '2.8 TB'"""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if abs(n) >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n / 1e3:.3g} kB"


def spelled(job):
    """Name a plan.  -> 'dp=4 x tp=8, ZeRO 1, recompute attention, 2 rows at a time'"""
    axes = [f"{name}={getattr(job, name)}" for name in ("dp", "pp", "tp") if getattr(job, name) > 1]
    parts = [" x ".join(axes) or "one card"]
    parts += [f"{job.v} chunks"] * (job.v > 1) + [f"ZeRO {job.zero}"] * (job.zero > 0)
    parts += [f"recompute {job.again}"] * bool(job.again)
    return ", ".join([*parts, f"{job.rows} row{'s' * (job.rows > 1)} at a time"])


def told(took, job, card):
    """Describe the plan that was found.  -> lines"""
    held = estimate.held(job)
    rows = [f"plan       {spelled(job)}",
            f"step       {took.all:.3g} s, MFU {estimate.mfu(job, card, took.all):.0%}: "
            + ", ".join(f"{WHERE[name]} {part:.3g} s" for name, part in took._asdict().items()
                        if part > 0.005 * took.all),
            "holds      " + ", ".join(f"{name} {size(n)}" for name, n in held._asdict().items())
            + f": {size(held.all)} of {size(card.memory)}",
            f"sends      tp {size(estimate.sent_in_layers(job))} in the node; outside pp "
            f"{size(estimate.sent_to_stages(job))}, dp {size(estimate.sent_to_replicas(job))}; "
            "per card and step"]
    if job.pp > 1:
        idle = estimate.bubble(job)
        rows.append(f"bubble     (p-1)/(v m) = {idle:.1%} of the ideal, {idle / (1 + idle):.1%} of "
                    f"the total; m = {job.microbatches}")
    used = {"dp": job.dp > 1, "tp": job.tp > 1, "sp": job.sp, "pp": job.pp > 1, "v": job.v > 1,
            "zero": job.zero > 0, "again": job.again}
    shown = [f"lessons.{LESSONS[name]}" for name, is_used in used.items() if is_used]
    return rows + [f"see        {', '.join(shown) or 'lessons.step'}"]


def lost(took, best):
    """Say where a plan loses most against the best one."""
    worse = {name: getattr(took, name) - getattr(best, name) for name in WHERE}
    most = max(worse, key=worse.get)
    return f"+ {took.all - best.all:.3g} s: {WHERE[most]} + {worse[most]:.3g} s"


def published():
    """The estimate beside published steps.  -> lines"""
    fitted, lines = estimate.fit(estimate.RUNS[::2]), []
    errors = []
    for i, run in enumerate(estimate.RUNS):
        found = estimate.seconds(run.job, CARDS["a100"], fitted).all
        errors.append(found / run.seconds - 1)
        lines.append(f"{run.source:17} {run.job.parameters / 1e9:7,.1f}e9 {run.job.cards:5} cards  "
                     f"{run.seconds:7.2f} s  {found:7.2f} s  {errors[-1]:+6.1%}  "
                     f"{'tried' if i % 2 else 'fitted'}")
    tried = sorted(map(abs, errors[1::2]))
    return ["source             parameters   cards   measured  estimated   error", *lines,
            f"tried: median {tried[len(tried) // 2]:.1%}, worst {tried[-1]:.1%}; shares of an "
            f"A100's figures: {', '.join(f'{x:.3f}' for x in fitted)}"]


# ------------------------------------------------------------------------------ the command

def main():
    args = parser().parse_args()
    files.ready(args.json)
    if environment.rank() != 0:
        return 0
    if args.published:
        print(*published(), sep="\n")
        return 0
    if not args.cards:
        raise BadInput("say how many cards there are: --cards 8")
    job, card = model(args), CARDS[args.card]
    card = replace(card, memory=args.memory * 1e9) if args.memory else card
    print(*tree(job, card, args.cards), "", sep="\n")
    found = plans(job, card, args.cards, args.per_node)
    best, *others = found
    print(*told(*best, card), sep="\n")
    for took, each in others[:3]:
        print(f"instead    {spelled(each)}: {lost(took, best[0])}")
    return files.deliver(("data", args.json, files.numbers([
        dict(plan=spelled(each), seconds=took._asdict(), held=estimate.held(each)._asdict(),
             mfu=estimate.mfu(each, card, took.all)) for took, each in found])))


if __name__ == "__main__":
    launch.run(main)
