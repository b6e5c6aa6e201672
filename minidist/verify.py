"""Verify: prove that a layout of the model over ranks is the same training as one process.

                     batch --+--> train_step on the mesh ----> loss, gradients, parameters
                             |                                       | gathered by placement
                             +--> train_step on the twin ----> loss, gradients, parameters = ?
                                  (rank 0 alone, plain model)

Compared after every step: the loss, the gradient's norm, every gradient, every parameter; and
bitwise, on the ranks that should hold the same, parameters and gradients.

    relative difference of a tensor = max|a - b| / max|reference|

A reference that is zero up to rounding (the gradient of key biases: softmax does not see them)
has no scale of its own; its scale is the largest gradient of the model. The bound is 1e-11 in
float64: sums in another order differ by about 1e-16 per addition, and a few steps of training
amplify that to some 1e-14; a real mistake, such as one missing sum, is 1e-3 or larger.

Compare with SGD as well as AdamW: AdamW's step does not change when all gradients are, say,
twice too large. And give AdamW eps=1e-5: with the usual 1e-8 it divides the rounding noise of
gradients that are exactly zero by next to nothing, and takes steps from noise.

Lesson: mpirun -n 4 python -m lessons.dp
"""
import hashlib
from dataclasses import dataclass

import numpy as np

from minidist.collectives import all_reduce, broadcast
from minidist.placement import Held, join
from minidist.step import train_step

BOUND = 1e-11
ADAMW_EPS = 1e-5
ROUNDING = 1e-12                # this far below the largest gradient, a gradient is zero


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

    def check(self, step, model, batch, max_norm=None):
        """Take the step that `step` reports with the twin too, and compare.  -> Verdict

        After a difference nothing is compared any more: the first step that differs is named."""
        if not self.verdict.equal:
            return self.verdict
        differences = {f"{name} on ranks that should agree": np.inf
                       for name in unequal_replicas(model.parameters(), self.mesh)}
        ours = gathered(model.parameters())
        if self.mesh.world.rank == 0:
            reference = train_step(self.model, batch, self.optimizer, max_norm=max_norm)
            differences.update(compare_steps(step, reference))
            differences.update(compare(ours, gathered(self.model.parameters())))
        self.note(differences)
        return self.verdict

    def note(self, differences):
        """Take the largest difference into the verdict, as rank 0 sees it."""
        v = self.verdict
        v.steps += 1
        where = max(differences, key=differences.get, default="")
        worst = broadcast(np.array([differences.get(where, 0.0)]), self.mesh.world)[0]
        if worst >= v.worst:
            v.worst, v.where = float(worst), where
        v.equal = bool(v.worst <= v.bound)


def train(make_model, make_optimizer, strategy, mesh, batches, bound=BOUND, **options):
    """Train strategy(plain model, mesh) and a twin side by side.  -> Verdict

    options: num_microbatches and max_norm of train_step."""
    model = strategy(make_model(), mesh)
    optimizer = make_optimizer(model.parameters())
    twin = Twin(make_model, make_optimizer, mesh, bound)
    for batch in batches:
        step = train_step(model, batch, optimizer, mesh, **options)
        if not twin.check(step, model, batch, options.get("max_norm")).equal:
            break
    return twin.verdict


# ---------------------------------------------------------------------------- comparing

def gathered(params):
    """Gather the global gradients and parameters.  {(name, kind): array or None}"""
    found = {}
    for p in params:
        grad = None if p.grad is None else join(p, p.grad, sliced=True)
        found[p.name, "gradient"] = grad
        found[p.name, "parameter"] = join(p, p.data)
    return {key: None if x is None else x.copy() for key, x in found.items()}


def compare_steps(ours, reference):
    """Compare what two steps report.  {what: relative difference}"""
    pairs = {"loss": (ours.loss, reference.loss), "gradient norm": (ours.norm, reference.norm)}
    found = {what: difference(a, b, abs(b)) for what, (a, b) in pairs.items()}
    found["number of targets"] = 0.0 if ours.count == reference.count else np.inf
    return found


def compare(ours, reference):
    """Compare gradients and parameters by name.  {what: relative difference}"""
    found = {}
    for kind in ("gradient", "parameter"):
        refs = {name: x for (name, k), x in reference.items() if k == kind}
        largest = max(map(size, refs.values()), default=0.0)
        for name, ref in refs.items():
            scale = size(ref) if size(ref) > ROUNDING * largest else largest
            found[f"{name} {kind}"] = difference(ours.get((name, kind)), ref, scale)
    unknown = {name for name, _ in ours.keys() - reference.keys()}
    return found | {f"{name}, which one process does not have": np.inf for name in unknown}


def size(x):
    """The largest magnitude in x; 0 for nothing."""
    return 0.0 if x is None or x.size == 0 else float(np.abs(x).max())


def difference(ours, reference, scale):
    """Relative difference; infinite if only one exists, or if the numbers are not finite."""
    if ours is None or reference is None:
        return 0.0 if ours is reference else np.inf
    gap = float(np.max(np.abs(ours - reference), initial=0.0))
    gap = gap / scale if scale else gap
    return gap if np.isfinite(gap) else np.inf


def unequal_replicas(params, mesh):
    """Name the parameters that differ, in value or gradient, where they should be the same.

    Compared by digest, over each axis along which a parameter is not cut.  Collective."""
    groups = {}
    for p in params:
        for axis in mesh.sizes:
            placed = p.placements.get(axis)
            if placed is None or isinstance(placed, Held):
                comm = mesh[axis] if placed is None else placed.comm
                groups.setdefault((axis, comm), []).append(p)
    bad = {}
    for (_, comm), members in groups.items():
        digests = np.array([digest(p) for p in members])
        same = all_reduce(digests, comm, op="max") == -all_reduce(-digests, comm, op="max")
        bad.update((p.name, True) for p, ok in zip(members, same) if not ok)
    stage = mesh[tuple(axis for axis in mesh.sizes if axis != "pp")]
    flags = all_reduce(np.array([p.name in bad for p in params], np.int32), stage, op="max")
    return [p.name for p, flag in zip(params, flags) if flag]


def digest(p):
    """Hash a parameter and its gradient, bit by bit.  -> int64"""
    hashed = hashlib.blake2b(np.ascontiguousarray(p.data), digest_size=7)
    if p.grad is not None and not p.sliced:
        hashed.update(np.ascontiguousarray(p.grad))
    return int.from_bytes(hashed.digest(), "little")
