"""check_layout: one line proves that a layout over ranks is the same training as one process.

    check_layout(lambda model, mesh: dp.parallelize(model, mesh["dp"]), dp=3)
    check_layout(my_strategy, dp=2, tp=2, kv_heads=2, microbatches=3)

Thread ranks, float64, with everything on that could hide a mistake: dropout, ragged targets,
grouped heads, a tied head, no zero anywhere, clipping; SGD and AdamW. Compared after every step:
loss, gradient norm, every gradient, every parameter, replicas bitwise (minidist.verify).
"""
import numpy as np

from minidist import verify
from minidist.engine.data import random_batch
from minidist.engine.gpt import GPT, GPTConfig
from minidist.engine.optim import SGD, AdamW
from minidist.mesh import DeviceMesh
from minidist.ranks.comm import run_threads
from tests.models import TINY, perturb

OPTIMIZERS = {
    "SGD": lambda params: SGD(params, lr=0.5, momentum=0.9),
    "AdamW": lambda params: AdamW(params, lr=0.01, eps=verify.ADAMW_EPS),
}


def check_layout(strategy, dp=1, pp=1, cp=1, tp=1, steps=3, **options):
    """Fail unless strategy(plain model, mesh) trains as one process does, SGD and AdamW.

    options: see `layout`."""
    for name in OPTIMIZERS:
        verdict = layout(strategy, name, dict(dp=dp, pp=pp, cp=cp, tp=tp), steps, **options)
        assert verdict.equal and verdict.steps == steps, f"{name}: {verdict.line()}"


def layout(strategy, optimizer, sizes, steps=3, microbatches=1, rows=5, prepare=perturb,
           max_norm=0.5, sync=False, **config):
    """Train a layout and its twin on thread ranks.  -> rank 0's Verdict

    prepare(model): changes the plain model first; rows: of the global batch, uneven by default;
    sync: with synchronous sends; config: replaces sizes of tests.models.TINY."""
    def rank(world):
        return verify.train(lambda: prepare(GPT(config_, seed=1, dtype=np.float64)),
                            OPTIMIZERS[optimizer], strategy, DeviceMesh(world, **sizes), batches,
                            num_microbatches=microbatches, max_norm=max_norm)

    config_ = GPTConfig(**{**TINY, "dropout": 0.2, **config})
    batches = [random_batch(config_.vocab, config_.context, rows, seed=7, step=t)
               for t in range(steps)]
    verdicts = run_threads(int(np.prod(list(sizes.values()))), rank, sync=sync, timeout=60)
    assert len({(v.equal, v.worst, v.steps) for v in verdicts}) == 1      # all ranks agree
    return verdicts[0]
