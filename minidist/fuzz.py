"""Fuzz: random combinations of everything that a training can be told, each beside its twin.

    seed -> MESH, OTHERS, FLAGS, one choice after another -> flags of train, and what has no flag
                                                                |
    EQUIVALENT to one process   or   refused, in a sentence, before the first message of a step

Ranks are threads of this process. A choice depends on its name, the seed and what it is given by
the choices before it, so a technique joins with one line, and its line changes no other choice.
A case is found again by its seed alone.

Run:    python -m minidist.verify --fuzz 300 --seed 0
        python -m minidist.verify --fuzz 1 --seed 17       case 17 of these
Lesson: mpirun -n 4 python -m lessons.dp
"""
import itertools
import math
import tempfile
import zlib
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch

import numpy as np

from minidist import BadInput, files, parallel, schedules, train, verify
from minidist.engine.data import random_batch
from minidist.engine.functional import IGNORE
from minidist.engine.gpt import GPTConfig
from minidist.ranks.comm import run_threads
from minidist.step import train_step

RANKS, STEPS, PATIENCE = 8, 3, 120              # of a case, at most; PATIENCE in seconds
ASTRAY = 0.02                                   # how often a flag is given where it has no place
EQUIVALENT, REFUSED = "EQUIVALENT", "refused"


# ------------------------------------------------------------------------------ the table

@dataclass(frozen=True)
class Choice:
    """One thing to be chosen.  where(chosen before): does it make sense?  If not, mostly None"""
    name: str
    values: object                              # a tuple, or what makes one of what is chosen
    where: object = lambda c: True

    def draw(self, seed, chosen):
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        values = self.values(chosen) if callable(self.values) else self.values
        if not self.where(chosen) and rng.random() > ASTRAY:
            return None
        return values[rng.integers(len(values))]


def meshes():
    """All sizes of dp, cp, tp and pp that fit on so many ranks; one of them alone twice."""
    found = [axes for axes in itertools.product((1, 2, 3, 4), repeat=4) if math.prod(axes) <= RANKS]
    return tuple(found + [axes for axes in found if axes.count(1) == 3])


TAKE_TWO = "interleaved", "zb-v", "dualpipe-v"          # chunks per rank


def schedules_for(chunks):
    """List the schedules that so many layers per rank are enough for."""
    return None, *(name for name in schedules.ORDERS if chunks > 1 or name not in TAKE_TWO)


def splits(c):
    """Can heads and key/value heads be exchanged for tokens?"""
    heads = c["heads"] // c["tp"]
    return heads % c["cp"] == 0 and c["kv-heads"] is None


def keeps_weights(c):
    """Does attention keep the T x T weights, which could be computed again instead?"""
    return c["attention"] != "tiled" and (c["cp"] == 1 or c["cp-method"] == "ulysses")


# Flags of minidist.train, by name; None leaves one out, True gives it without a value.
FLAGS = [
    Choice("optimizer", ("adamw", "sgd")),
    Choice("layers", lambda c: tuple(range(c["pp"], 5))),
    Choice("kv-heads", lambda c: (None, *(n for n in (1, 2, 3) if c["heads"] % n == 0 and (
        n % c["tp"] == 0 or c["tp"] % n == 0)))),
    Choice("dropout", (None, 0.2)),
    Choice("batch", lambda c: (c["dp"], c["dp"] + 1, 2 * c["dp"] + 1, 7)),
    Choice("grad-accum", lambda c: (None, 1, 2, 3, c["batch"])[:c["batch"] + 1]),
    Choice("clip", (0, 0.5, 1000)),
    Choice("sp", (None, "again", "keep"), lambda c: c["tp"] > 1),
    Choice("cp-method", lambda c: ("zigzag", "ring", "ulysses" if splits(c) else "ring"),
           lambda c: c["cp"] > 1),
    Choice("attention", (None, "full", "tiled")),
    Choice("schedule", lambda c: schedules_for(c["layers"] // c["pp"]), lambda c: c["pp"] > 1),
    Choice("chunks", (None, None, None, 2), lambda c: c["schedule"] in TAKE_TWO),
    Choice("zero", lambda c: (None, 1, 2, 3) if c["pp"] == 1 else (None, 1),
           lambda c: c["dp"] > 1),
    Choice("recompute", lambda c: (None, None, "blocks", "sqrt" if c["pp"] == 1 else "blocks",
                                   "attention" if keeps_weights(c) else "blocks")),
    Choice("offload", (None, None, None, "DIR")),
    Choice("experts", (None, None, 2, 3, 4), lambda c: not c["sp"]),
    Choice("ep", lambda c: (None, *(n for n in (2, 3) if c["dp"] % n == 0)),
           lambda c: c["experts"]),
    Choice("top-k", (None, 1, 2), lambda c: c["experts"]),
    Choice("balance", lambda c: (None, "bias", "none", "aux" if c["grad-accum"] == 1 else "bias"),
           lambda c: c["experts"]),
    Choice("shared-expert", (None, True), lambda c: c["experts"]),
    Choice("capacity", (None, 1.0, 1.5), lambda c: c["experts"] and c["grad-accum"] == 1
           and c["dp"] * c["cp"] == 1),
    Choice("precision", (None, "fp16", "bf16"), lambda c: not c["offload"] and not c["experts"]),
]
# What fixes sizes and the run's length, what is only shown, how files are kept; another training.
LEFT_OUT = set("help preset context width heads dtype text seed steps lr verify audit sample out "
               "trace no-figure json microbatches resume keep save-every compress "
               "compress-after".split())
# What comes first, and what no flag says.
MESH = Choice("mesh", meshes())
OTHERS = [
    Choice("heads", lambda c: tuple(n for n in (1, 2, 3, 4, 6, 8) if n % c["tp"] == 0)),
    Choice("head width", (2, 3, 4)),
    Choice("vocab", (5, 7, 13)),
    Choice("context", lambda c: (*3 * (2 * c["cp"] * c["tp"],), 6)),
    Choice("tied", (True, False)),
    Choice("frozen", (None, None, "embed.*", "blocks.0.*", "*.bias", "head.*", "*mlp*.weight")),
    Choice("targets", ("all", "ragged", "a row without")),
]
AXES = "dp", "cp", "tp", "pp"


def choose(seed):
    """Draw a case.  -> {name: value}"""
    chosen = dict(zip(AXES, MESH.draw(seed, {})))
    for choice in [*OTHERS, *FLAGS]:
        chosen[choice.name] = choice.draw(seed, chosen)
    return chosen


def flags(chosen):
    """Write a case as flags of minidist.train.  -> list of words"""
    words = []
    for name in [*AXES, *(choice.name for choice in FLAGS)]:
        value = chosen[name]
        if value is not None and (name not in AXES or value > 1 or name == "dp"):
            words += [f"--{name}"] + ([] if value is True else [str(value)])
    return words


# ------------------------------------------------------------------------------ one case

@dataclass(frozen=True)
class Outcome:
    """What became of a case.  kind: EQUIVALENT, refused, or what should not be"""
    seed: int
    kind: str
    words: str
    worst: float | None
    case: str

    @property
    def good(self):
        return self.kind in (EQUIVALENT, REFUSED)

    def line(self):
        return f"seed {self.seed:<6} {self.words}\n            {self.case}"


def run(seed):
    """Train a case on thread ranks beside its twin.  -> Outcome"""
    chosen = choose(seed)
    others = ", ".join(f"{choice.name} {chosen[choice.name]}" for choice in OTHERS
                       if chosen[choice.name])
    return outcome(seed, flags(chosen), chosen, others)


def outcome(seed, words, chosen, others=""):
    """Train what these flags of minidist.train say, on as many thread ranks.  -> Outcome

    words: with DIR where a directory is meant.  chosen: sizes, and what no flag says."""
    case, worst = " ".join(words) + f"   {others}" * bool(others), None
    ranks = math.prod(chosen[axis] for axis in AXES)
    try:
        with tempfile.TemporaryDirectory() as folder:
            words = [folder if word == "DIR" else word for word in words]
            said = run_threads(ranks, rank, words, chosen, timeout=PATIENCE)
            kind, words, worst = alike(said)
    except TimeoutError as error:
        kind, words = "HANGS", str(error)
    except Exception as error:                              # whatever it is, it is to be told
        kind, words = "CRASHED", f"CRASHED  {type(error).__name__}: {error}"
    return Outcome(seed, kind, words, worst, case)


def alike(said):
    """Take what all ranks say, if it is the same.  [(kind, words, worst)] -> one of them"""
    if len({kind for kind, _, _ in said}) > 1 or said[0][0] == REFUSED and len(set(said)) > 1:
        return "RANKS DIFFER", f"RANKS DIFFER  {said}", None
    return said[0]


def rank(world, words, chosen):
    """Be one rank of a case.  -> kind, words, largest difference"""
    began = False
    try:
        o = options(words)
        mesh, config = parallel.make_mesh(o, world), configuration(chosen, o)
        model, optimizer, twin = train.assemble(o, config, mesh, lambda m: prepare(m, chosen))
        for step in range(o.steps):
            batch, began = draw_batch(config, o.batch, chosen, step), True
            report = train_step(model, batch, optimizer, mesh, o.grad_accum, o.clip or None)
            if not twin.check(report, model, optimizer, batch, o.clip or None).equal:
                break
    except BadInput as error:
        kind = "REFUSED LATE" if began else REFUSED
        return kind, f"{kind}  {error}", None
    v = twin.verdict
    return (EQUIVALENT if v.equal else "DIVERGED"), v.line(), v.worst


def options(words):
    """Let minidist.train read a case's flags."""
    return train.options(["--verify", "--steps", str(STEPS), *words])


def configuration(chosen, o):
    """Fix the sizes of a case's model."""
    return GPTConfig(chosen["vocab"], chosen["context"], chosen["heads"] * chosen["head width"],
                     chosen["heads"], o.layers, o.kv_heads, o.dropout, chosen["tied"])


def prepare(model, chosen):
    """Let no parameter be zero, and freeze what the case freezes."""
    for p in verify.perturb(model).parameters():
        p.requires_grad = not fnmatch(p.name, chosen["frozen"] or "")
    return model


def draw_batch(config, rows, chosen, step):
    """Draw a batch: with every target, with some to ignore, or with a row of none."""
    batch = random_batch(config.vocab, config.context, rows, chosen["vocab"], step,
                         ragged=chosen["targets"] != "all")
    if chosen["targets"] == "a row without":
        batch.targets[step % rows] = IGNORE
    return batch


# ------------------------------------------------------------------------------ many cases

def many(n, seed, json):
    """Run cases seed, seed + 1, ...; say what became of each.  -> exit status"""
    outcomes = []
    for each in range(seed, seed + n):
        outcomes.append(run(each))
        print(outcomes[-1].line(), flush=True)
    print(*summary(outcomes), sep="\n")
    status = files.deliver(("data", json, files.numbers({"rows": [
        dict(vars(outcome)) for outcome in outcomes]})))
    return status or int(not all(outcome.good for outcome in outcomes))


def summary(outcomes):
    """Count what became of cases.  -> one line, then one for each that should not be"""
    counts = Counter(outcome.kind for outcome in outcomes)
    worst = max((o for o in outcomes if o.kind == EQUIVALENT), key=lambda o: o.worst, default=None)
    line = f"{len(outcomes)} cases: " + ", ".join(f"{n} {kind}" for kind, n in counts.items())
    line += f"; max relative difference {worst.worst:.1e} (seed {worst.seed})" if worst else ""
    return [line] + [f"python -m minidist.verify --fuzz 1 --seed {o.seed}     # {o.kind}"
                     for o in outcomes if not o.good]
