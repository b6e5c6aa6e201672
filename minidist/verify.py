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
        params = model.parameters()
        unequal, ours, differences = unequal_replicas(params, self.mesh), gathered(params), {}
        if self.mesh.world.rank == 0:
            reference = train_step(self.model, batch, self.optimizer, max_norm=max_norm)
            differences.update(compare_steps(step, reference))
            differences.update(compare(ours, gathered(self.model.parameters())))
        self.note(differences, unequal)
        return self.verdict

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
    """Find parameters that are not the same, bit by bit, where they should be.

    Value and gradient, over each axis along which a parameter is not cut.  Collective.
    -> {name: largest difference between two ranks, relative to the largest magnitude}"""
    found = dict.fromkeys((p.name for p in params), -1.0)
    for comm, members in replicas(params, mesh):
        digests = np.array([digest(p) for p in members])
        same = all_reduce(digests, comm, op="max") == -all_reduce(-digests, comm, op="max")
        for p, equal in zip(members, same):
            if not equal:
                found[p.name] = max(found[p.name], spread(p.data, comm))
    stage = mesh[tuple(axis for axis in mesh.sizes if axis != "pp")]
    worst = all_reduce(np.array([found[p.name] for p in params]), stage, op="max").tolist()
    return {p.name: value for p, value in zip(params, worst) if value >= 0}


def replicas(params, mesh):
    """List the groups that hold the same parameters.  [(Comm, [parameter])], alike on all ranks"""
    groups = {}
    for axis in mesh.sizes:
        for p in params:
            placed = p.placements.get(axis)
            if placed is None or isinstance(placed, Held):
                comm = mesh[axis] if placed is None else placed.comm
                groups.setdefault(comm, []).append(p)
    return [(comm, members) for comm, members in groups.items() if comm.size > 1]


def spread(x, comm):
    """How far the ranks' versions of x are apart, relative to its size.  Collective"""
    highest, lowest = all_reduce(x, comm, op="max"), -all_reduce(-x, comm, op="max")
    return difference(highest, lowest, max(size(highest), size(lowest)))


def digest(p):
    """Hash a parameter and its gradient, bit by bit.  -> int64"""
    hashed = hashlib.blake2b(np.ascontiguousarray(p.data), digest_size=7)
    if p.grad is not None and not p.sliced:
        hashed.update(np.ascontiguousarray(p.grad))
    return int.from_bytes(hashed.digest(), "little")
