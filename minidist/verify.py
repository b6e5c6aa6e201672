"""Verify: prove that a layout of the model over ranks is the same training as one process.

               batch --+--> train_step on the mesh ----> loss, gradients, parameters, state
                       |                                       | gathered by placement
                       +--> train_step on the twin ----> loss, gradients, parameters, state = ?
                            (rank 0 alone, plain model)    then the ranks' are taken over

Compared after every step: the loss, the gradient's norm, every gradient, every parameter, the
optimizer's state; and bitwise, on the ranks that should hold the same, parameters and gradients.
Then the twin takes over the ranks' parameters and optimizer state, so that each step is judged from
the same start: training amplifies rounding, and equal steps from equal states are equal trainings.

    relative difference of a tensor = max|a - b| / max|reference|

A reference that is zero up to rounding (the gradient of key biases: softmax does not see them)
has no scale of its own; its scale is the largest gradient of the model. The bound is 1e-11 in
float64: sums in another order differ by about 1e-16 per addition; a real mistake, such as one
missing sum, is 1e-3 or larger. Where terms cancel, rounding alone can pass the bound. So before the
twin says DIVERGED it repeats its step row by row, from parameters moved by one unit in the last
place: what moves by so much when nothing is wrong is no difference.

Compare with SGD as well as AdamW: AdamW's step does not change when all gradients are, say,
twice too large. And give AdamW eps=1e-5: with the usual 1e-8 it divides the rounding noise of
gradients that are exactly zero by next to nothing, and takes steps from noise.

A strategy of your own, on thread ranks and a small GPT that hides nothing:

    from minidist import verify, zero

    def parallelize(model, comm):                       # yours: plain model in, spread model out
        return zero.parallelize(model, comm, stage=2)

    def attach(optimizer, model, mesh):                 # yours, if it changes the optimizer as well
        return zero.attach(optimizer, model)

    print(verify.layout(lambda model, mesh: parallelize(model, mesh["dp"]), attach, dp=3).line())

Every pair of techniques, and random combinations of all that stands:
python -m minidist.verify --sweep, --fuzz 300 --seed 0.
Lesson: mpirun -n 4 python -m lessons.dp
"""
from dataclasses import dataclass

import numpy as np

from minidist.collectives import broadcast
from minidist.engine.data import random_batch
from minidist.engine.gpt import GPT, GPTConfig
from minidist.engine.nn import init
from minidist.engine.optim import AdamW
from minidist.mesh import DeviceMesh
from minidist.placement import join, merge
from minidist.ranks.comm import run_threads
from minidist.replicas import difference, size, unequal_replicas
from minidist.step import train_step

BOUND = 1e-11
ADAMW_EPS = 1e-5
ROUNDING = 1e-12                # this far below the largest gradient, a gradient is zero
NOISE, TRIALS = 10, 3           # a difference is more than 10 times what moves in 3 trials
SMALL = dict(vocab=13, context=8, width=16, heads=4, layers=3, kv_heads=2, dropout=0.0, tied=True)


@dataclass
class Verdict:
    """What the comparison has found up to now; the same on every rank, but for the names."""
    bound: float = BOUND
    steps: int = 0
    worst: float = 0.0
    where: str = ""             # what differs most, known to rank 0
    equal: bool = True

    def line(self):
        """Say it in one line."""
        if self.equal:
            return (f"EQUIVALENT  max relative difference {self.worst:.1e} "
                    f"(bound {self.bound:.0e})")
        return f"DIVERGED at step {self.steps - 1}: {self.where}, {self.worst:.1e}"


class Twin:
    """The same training in one process, on rank 0, one step behind the mesh.

    make_model() -> the plain model; make_optimizer(parameters) -> optimizer.
    Collective: every rank calls everything here."""

    def __init__(self, make_model, make_optimizer, mesh, bound=BOUND):
        self.mesh, self.verdict = mesh, Verdict(bound)
        if mesh.world.rank == 0:
            self.model = make_model()
            self.optimizer = make_optimizer(self.model.parameters())
            self.start = self.numbers()

    def check(self, step, model, optimizer, batch, max_norm=None):
        """Take the step that `step` reports with the twin too, and compare.  -> Verdict

        After a difference nothing is compared any more: the first step that differs is named."""
        if not self.verdict.equal:
            return self.verdict
        params, found = model.parameters(), {}
        unequal = unequal_replicas(params, self.mesh)
        ours = merge(gathered(params, optimizer), self.mesh) | reported(step)
        if self.mesh.world.rank == 0:
            with self.mesh.world.at_work("trains the twin"):
                found = self.differences(ours, batch, max_norm)
        self.note(found, unequal)
        if self.mesh.world.rank == 0 and self.verdict.equal:
            self.take_over(ours, getattr(optimizer, "t", self.optimizer.t))
            self.start = self.numbers()
        return self.verdict

    def differences(self, ours, batch, max_norm):
        """Take the twin's step, which may last as long as those of all ranks.  -> {what: gap}"""
        reference = self.take_step(batch, max_norm)
        found = compare(ours, reference)
        if max(found.values()) > self.verdict.bound:
            found = self.beyond_rounding(found, ours, reference, batch, max_norm)
        return found

    def take_step(self, batch, max_norm, pieces=1):
        """Take the twin's step.  -> {what: number or array}"""
        step = train_step(self.model, batch, self.optimizer, None, pieces, max_norm)
        return gathered(self.model.parameters(), self.optimizer) | reported(step)

    def numbers(self):
        """Copy parameters and optimizer state."""
        found = gathered(self.model.parameters(), self.optimizer)
        self.scale = self.optimizer.loss_scale
        return {what: np.array(x) for what, x in found.items()}, self.optimizer.t

    def take_over(self, numbers, t):
        """Go on from these parameters, this optimizer state and this step count."""
        for p in self.model.parameters():
            p.data[...] = numbers[f"{p.name} parameter"]
            state = [what for what in numbers if what.startswith(f"{p.name} optimizer state ")]
            self.optimizer.keep(p, [np.array(numbers[what]) for what in state])
        self.optimizer.t = t

    def beyond_rounding(self, found, ours, reference, batch, max_norm):
        """Measure differences anew, against what rounding alone can move.

        The step is repeated from parameters moved by at most one unit in the last place, and with
        its sums in another order: one row after the other."""
        moved, rng = dict.fromkeys(reference, 0.0), np.random.default_rng(0)
        for _ in range(TRIALS):
            self.take_over(*self.start)
            self.optimizer.loss_scale = self.scale
            for p in self.model.parameters():
                p.data += np.spacing(p.data) * rng.integers(-1, 2, p.shape)
            for what, x in self.take_step(batch, max_norm, len(batch.rows)).items():
                if what in moved:
                    moved[what] = max(moved[what], size(x - reference[what]))
        return {what: min(gap, self.verdict.bound * size(ours[what] - reference[what])
                          / (NOISE * moved[what])) if moved.get(what) and what in ours else gap
                for what, gap in found.items()}

    def note(self, differences, unequal):
        """Take what differs most into the verdict, as rank 0 sees it."""
        v = self.verdict
        v.steps += 1
        where = max(differences, key=differences.get, default="")
        worst = float(broadcast(np.array([differences.get(where, 0.0)]), self.mesh.world)[0])
        v.equal = worst <= v.bound and not unequal
        if worst <= v.bound and unequal:
            name = max(unequal, key=unequal.get)
            where, worst = f"{name} differs between ranks that should agree", unequal[name]
        if worst >= v.worst or not v.equal:
            v.worst, v.where = worst, where


def train(make_model, make_optimizer, strategy, mesh, batches, bound=BOUND, equip=None, **options):
    """Train strategy(plain model, mesh) and a twin side by side.  -> Verdict

    equip(optimizer, model, mesh) -> optimizer: what the strategy makes of the ranks' optimizer;
    the twin's stays plain.  options: num_microbatches, max_norm and passes of train_step."""
    model = strategy(make_model(), mesh)
    optimizer = make_optimizer(model.parameters())
    optimizer = equip(optimizer, model, mesh) if equip else optimizer
    twin = Twin(make_model, make_optimizer, mesh, bound)
    for batch in batches:
        step = train_step(model, batch, optimizer, mesh, **options)
        if not twin.check(step, model, optimizer, batch, options.get("max_norm")).equal:
            break
    return twin.verdict


# --------------------------------------------------------------------- a layout, in one line

def layout(strategy, equip=None, make_optimizer=None, steps=3, rows=5, prepare=None, sync=False,
           max_norm=0.5, num_microbatches=1, passes=None, dp=1, pp=1, cp=1, tp=1, ep=1, **config):
    """Train a layout and its twin on thread ranks.  -> Verdict

    With everything on that could hide a mistake: float64, dropout, ragged targets, grouped heads,
    a tied head, no zero anywhere, clipping.  make_optimizer(parameters): AdamW if not given;
    rows: of the global batch, uneven by default; prepare(model): changes the plain model first;
    sync: with synchronous sends; config: replaces sizes of SMALL."""
    config = GPTConfig(**{**SMALL, "dropout": 0.2, **config})
    batches = [random_batch(config.vocab, config.context, rows, seed=7, step=t)
               for t in range(steps)]

    def plain():
        return (prepare or perturb)(GPT(config, seed=1, dtype=np.float64))

    def rank(world):
        mesh = DeviceMesh(world, dp=dp, pp=pp, cp=cp, tp=tp, ep=ep)
        return train(plain, make_optimizer or careful_adamw, strategy, mesh, batches, equip=equip,
                     num_microbatches=num_microbatches, max_norm=max_norm, passes=passes)

    return run_threads(dp * pp * cp * tp, rank, sync=sync, timeout=600)[0]


def careful_adamw(params):
    """Make the AdamW that does not step from rounding noise."""
    return AdamW(params, lr=0.01, eps=ADAMW_EPS)


def perturb(model, std=0.1):
    """Move every parameter by noise from its name, so that no bias is 0 and no norm is 1."""
    for p in model.parameters():
        p.data += init("noise." + p.name, p.full_shape, seed=1, std=std, dtype=p.dtype)
    return model


# ---------------------------------------------------------------------------- comparing

def gathered(params, optimizer):
    """Gather all that these ranks hold of a training.  {"w gradient": whole}  Collective"""
    found = {}
    for p in params:
        found[f"{p.name} parameter"] = join(p, p.data)
        if p.grad is not None:
            found[f"{p.name} gradient"] = join(p, p.grad, sliced=True)
        for i, x in enumerate(optimizer.kept(p) if hasattr(optimizer, "kept") else ()):
            found[f"{p.name} optimizer state {i}"] = join(p, x, sliced=True)
    return found


def reported(step):
    """List what a Step says."""
    said = {"loss": step.loss, "gradient norm": 0 if step.skipped else step.norm,
            "loss scale": step.scale, "skipped": step.skipped, "number of targets": step.count}
    return {what: np.array(float(x)) for what, x in said.items()}


def compare(ours, reference):
    """Compare by name.  {"w gradient": array}, twice -> {"w gradient": relative difference}"""
    found, largest = {}, {}
    for what, ref in reference.items():
        kind = what.partition(" ")[2]
        largest[kind] = max(largest.get(kind, 0.0), size(ref))
    for what, ref in reference.items():
        most = largest[what.partition(" ")[2]]
        scale = size(ref) if size(ref) > ROUNDING * most else most
        found[what] = difference(ours.get(what), ref, scale)
    unknown = [what for what in ours if what not in reference]
    return found | {f"{what}, which one process does not have": np.inf for what in unknown}


if __name__ == "__main__":
    from minidist import sweep
    from minidist.ranks import launch
    launch.run(sweep.main)
