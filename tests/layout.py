"""check_layout: one line proves that a layout over ranks is the same training as one process.

    check_layout(lambda model, mesh: dp.parallelize(model, mesh["dp"]), dp=3)
    check_layout(my_strategy, dp=2, tp=2, kv_heads=2, microbatches=3)

verify.layout, with SGD and with AdamW: compared after every step are loss, gradient norm, every
gradient, every parameter, the optimizer's state, replicas bitwise.
"""
from minidist import verify
from minidist.engine.optim import SGD, AdamW

OPTIMIZERS = {
    "SGD": lambda params: SGD(params, lr=0.5, momentum=0.9),
    "AdamW": lambda params: AdamW(params, lr=0.01, eps=verify.ADAMW_EPS),
}


def check_layout(strategy, steps=3, **options):
    """Fail unless strategy(plain model, mesh) trains as one process does, SGD and AdamW.

    options: see verify.layout; the sizes of axes, dp=2, are among them."""
    for name in OPTIMIZERS:
        verdict = layout(strategy, name, {}, steps, **options)
        assert verdict.equal and verdict.steps == steps, f"{name}: {verdict.line()}"


def layout(strategy, optimizer, sizes, steps=3, microbatches=1, **options):
    """Train a layout and its twin on thread ranks.  -> Verdict"""
    return verify.layout(strategy, make_optimizer=OPTIMIZERS[optimizer], steps=steps,
                         num_microbatches=microbatches, **sizes, **options)
