"""Sweep: every pair of techniques beside one process, and the matrix of what has been proven.

Each technique is a few flags of minidist.train. Two of them joined are a training on thread ranks
of this process, with everything on that could hide a mistake: dropout, ragged targets, a tied head,
clipping, uneven rows, no zero anywhere. A cell of the matrix says what became of it:

    =   EQUIVALENT to one process: loss, gradients, norm, parameters, optimizer state
    a   refused, with the reason a of pairs.TABLE
    .   the two are one technique in two forms, and one run has one of them

Run:    python -m minidist.verify --sweep
Lesson: mpirun -n 4 python -m lessons.mesh
"""
import math
import string
from itertools import combinations

from minidist import BadInput, files, flags, fuzz, pairs
from minidist.ranks import environment

TECHNIQUES = {
    "dp": {"dp": 2},
    "zero 1": {"dp": 2, "zero": 1},
    "zero 2": {"dp": 2, "zero": 2},
    "zero 3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sp": "again"},
    "cp ring": {"cp": 2, "cp-method": "ring"},
    "cp zigzag": {"cp": 2, "cp-method": "zigzag"},
    "cp ulysses": {"cp": 2, "cp-method": "ulysses"},
    "pp": {"pp": 2, "schedule": "1f1b", "grad-accum": 2},
    "pp interleaved": {"pp": 2, "schedule": "interleaved", "grad-accum": 2},
    "experts": {"experts": 4, "balance": "bias"},
    "ep": {"dp": 2, "experts": 4, "balance": "bias", "ep": 2},
    "tiled": {"attention": "tiled"},
    "recompute blocks": {"recompute": "blocks"},
    "recompute sqrt": {"recompute": "sqrt"},
    "recompute attention": {"recompute": "attention"},
    "offload": {"offload": "DIR"},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
}
ALWAYS = {"layers": 4, "kv-heads": 2, "dropout": 0.2, "batch": 5, "clip": 0.5}
SIZES = {"heads": 4, "head width": 3, "vocab": 7, "context": 8, "tied": True, "frozen": None,
         "targets": "ragged"}
MOST = 16                                               # ranks of a combination


def joined(*names):
    """Join the flags of techniques; None if they are forms of one, of which a run has one."""
    found = {}
    for name in names:
        for flag, value in TECHNIQUES[name].items():
            both = found.setdefault(flag, value)
            if both != value:
                return None
    return found


def goes(names):
    """Say whether techniques go together, by the table of pairs alone, on few enough ranks."""
    found = joined(*names)
    if found is None:
        return False
    sizes = {axis: found.get(axis, 1) for axis in fuzz.AXES}
    o = pairs.Flags({flag.replace("-", "_"): value for flag, value in found.items()})
    return math.prod(sizes.values()) <= MOST and not any(p.met(o, sizes) for p in pairs.TABLE)


def covering():
    """Choose combinations such that each two techniques that go together are in one of them.

    Greedy: begin with a pair that is in none yet, add what brings most such pairs.  -> lists"""
    left, chosen = [two for two in combinations(TECHNIQUES, 2) if goes(two)], []
    while left:
        names = [*left[0]]
        while True:
            gain = {t: sum((t, n) in left or (n, t) in left for n in names)
                    for t in TECHNIQUES if t not in names and goes([*names, t])}
            best = max(gain, key=gain.get, default=None)
            if not gain.get(best):
                break
            names.append(best)
        chosen.append(sorted(names, key=list(TECHNIQUES).index))
        left = [two for two in left if not set(two) <= set(names)]
    return chosen


def train(found, optimizer="adamw", steps=fuzz.STEPS):
    """Train with these flags on thread ranks beside one process.  {flag: value} -> fuzz.Outcome"""
    options = {"dp": 1} | ALWAYS | found | {"optimizer": optimizer, "steps": steps}
    words = [word for flag, value in options.items() for word in (f"--{flag}", str(value))]
    axes = {axis: found.get(axis, 1) for axis in fuzz.AXES}
    return fuzz.outcome(0, words, axes | SIZES)


def letter(one, other):
    """Name the reason for which two techniques do not go together.  -> "a" or None"""
    pair = pairs.refused(one, other)
    return pair and string.ascii_lowercase[pairs.TABLE.index(pair)]


def expected(one, other):
    """Say what a cell should be, without training: by the table of pairs."""
    return letter(one, other) or ("=" if joined(one, other) is not None else ".")


def cell(one, other):
    """Train two techniques.  -> what becomes of it, the Outcome"""
    if (found := joined(one, other)) is None:
        return ".", None
    outcome = train(found)
    if outcome.kind == fuzz.REFUSED:
        return letter(one, other) or "!", outcome
    return "=" if outcome.kind == fuzz.EQUIVALENT else "!", outcome


def matrix(look):
    """Draw the lower triangle, a line at a time.  look(one, other) -> a character"""
    names, wide = list(TECHNIQUES), max(map(len, TECHNIQUES))
    for i, name in enumerate(names):
        yield f"{name:{wide}}  " + "  ".join(look(name, other) for other in names[:i + 1])
    yield from ["", *reasons()]


def reasons():
    """List the reasons by their letters."""
    return [f"{string.ascii_lowercase[i]}   {' or '.join(pair.one)} with {' or '.join(pair.other)}"
            for i, pair in enumerate(pairs.TABLE)]


def everything(json):
    """Train all pairs, then several at once, and print the matrix.  -> exit status"""
    rows, bad = [], []

    def note(names, seen, wanted, outcome):
        rows.append({"techniques": names, "cell": seen, "case": outcome and outcome.case,
                     "words": outcome and outcome.words})
        if seen != wanted:
            bad.append(f"{' + '.join(names)}: {wanted} by the table, and here {seen}  "
                       f"{outcome.words if outcome else ''}")

    def look(one, other):
        seen, outcome = cell(one, other)
        note([one, other], seen, expected(one, other), outcome)
        return seen

    for line in matrix(look):
        print(line, flush=True)
    print()
    for names in covering():
        outcome = train(joined(*names))
        note(names, "=" if outcome.kind == fuzz.EQUIVALENT else "!", "=", outcome)
        print(f"{' + '.join(names)}: {outcome.words}", flush=True)
    print(*bad or [f"{len(rows)} combinations, each as the table says"], sep="\n")
    status = files.deliver(("data", json, files.numbers({"rows": rows})))
    return status or int(bool(bad))


def main():
    """Be `python -m minidist.verify`.  -> exit status"""
    p = flags.Parser(prog="python -m minidist.verify", description=__doc__.split("\n")[0],
                     epilog="example: python -m minidist.verify --fuzz 300 --seed 0")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--sweep", action="store_true", help="train every pair of techniques, and "
                      "several at once, each beside one process; print the matrix")
    what.add_argument("--fuzz", type=flags.integer(1), metavar="N",
                      help="train N random layouts, each beside its twin in one process")
    p.add_argument("--seed", type=flags.integer(0, 2 ** 31), default=0, metavar="S",
                   help="of the first case of --fuzz; the next one has S + 1 (default 0)")
    p.add_argument("--json", metavar="FILE", help="write what was printed, as data")
    args = p.parse_args()
    if environment.launched():
        raise BadInput("this command starts its own ranks, as threads; leave out -n and mpirun")
    files.ready(args.json)
    return everything(args.json) if args.sweep else fuzz.many(args.fuzz, args.seed, args.json)
