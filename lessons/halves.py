"""Two halves of a training, with a checkpoint between them, for the lesson on checkpoints."""
from lessons import kit, setting
from minidist import checkpoint, parallel
from minidist.engine import optim
from minidist.mesh import DeviceMesh
from minidist.placement import everything
from minidist.ranks.comm import solo
from minidist.step import train_step

ROWS, HALF = 5, 3                                   # of a batch; steps
RATE = optim.warmup_cosine(0.02, 2, 2 * HALF)
OTHER = {1: {}, 2: dict(tp=2), 3: dict(tp=3), 4: dict(tp=2, pp=2)}     # ranks -> the second mesh


def small():
    """A GPT of two layers, heads of two numbers."""
    return setting.model(layers=2, width=24)


class Run:
    """A rank's model, optimizer and mesh, and the losses it has seen."""

    def __init__(self, comm, sizes, stage=None):
        self.mesh, self.losses = DeviceMesh(comm, **sizes), []
        self.model = parallel.spread(small(), self.mesh, zero=stage)
        self.optimizer = parallel.equip(optim.AdamW(self.model.parameters(), RATE, eps=1e-5),
                                        self.model)

    def train(self, steps):
        self.losses += [train_step(self.model, setting.words(ROWS, t), self.optimizer, self.mesh,
                                   num_microbatches=2).loss for t in steps]
        return self


def first_half(comm, folder, steps=HALF):
    """Train, save, and train on, with ZeRO on dp.  -> Run, Found"""
    run = Run(comm, dict(dp=comm.size), stage=1).train(range(steps))
    with comm.counting() as counted:
        checkpoint.save(folder, run.model, run.optimizer, run.mesh, steps)
    gathered = counted.by_label.get("all_gather")
    run.sent = gathered.bytes if gathered else 0
    found = checkpoint.find(folder, comm)
    return run.train(range(steps, 2 * steps)), found


def second_half(comm, folder, sizes, steps=HALF):
    """Go on from there on a mesh; no sizes: the one of the first half.  -> Run"""
    run = Run(comm, sizes or dict(dp=comm.size), None if sizes else 1)
    checkpoint.load(checkpoint.find(folder, comm), run.model, run.optimizer, run.mesh)
    return run.train(range(steps, 2 * steps))


def other(comm):
    """The mesh of the second half: tp, and pp if there are enough ranks."""
    return OTHER.get(comm.size, dict(dp=comm.size))


def forgetful(what=""):
    """Train half on one rank, forget something, go on.  -> losses of the second half"""
    run = Run(solo(), {}).train(range(HALF))
    run.optimizer.state = {} if what == "state" else run.optimizer.state
    run.optimizer.t = 0 if what == "t" else run.optimizer.t
    late = 0 if what == "step" else HALF
    return run.train(range(late, late + HALF)).losses[HALF:]


def apart(run, reference):
    """How far two trainings are apart: losses of the second half and parameters, relative."""
    ours, theirs = (everything(r.model.parameters(), r.mesh) for r in (run, reference))
    last = kit.difference(run.losses[-1], reference.losses[-1])
    return max(last, *(kit.difference(ours[name], theirs[name]) for name in theirs))
