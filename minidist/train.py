"""Train a GPT on the characters of a text: the loss as it falls, its curve, a sample.

    text -> Corpus -> batch(seed, step) -> train_step -> loss, which listeners hear:
                                             |
        a line of progress, every tenth of the way a validation, the twin of --verify
        at the end: curve, sample, digest

What a run does is a function of its flags: the same command gives the same parameters, bit by bit,
and the digest printed at the end says so. Everything that can be refused is refused before the
first step. Files are written after the last one, also where that came early: at Ctrl-C, or when
numbers overflow. JSON knows no NaN: such a number is null.

Run:    python -m minidist.train --preset nano --steps 500
Lesson: python -m lessons.step
"""
import time
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from minidist import (BadInput, cost, files, flags, ledger, models, moe, parallel,
                      precision, resume, verify)
from minidist.engine import gpt
from minidist.engine.data import Corpus, default_text, read_text
from minidist.engine.nn import digest
from minidist.engine.tensor import no_grad
from minidist.mesh import DeviceMesh
from minidist.placement import everything
from minidist.progress import History, Progress, audit, draw, report
from minidist.ranks import launch
from minidist.recorder import Recorder
from minidist.step import summed, train_step
from minidist.trace import chrome

VALIDATIONS = 10                        # how often, spread evenly over the run
VALIDATION_BATCHES = 10                 # the same ones each time
VERIFIED = 10                           # steps compared by --verify


# ------------------------------------------------------------------------------ the request

def parser():
    p = flags.Parser(prog="python -m minidist.train", description=__doc__.split("\n")[0],
                     epilog="example: python -m minidist.train --preset nano --steps 500")
    flags.add_training(p)
    spread = parallel.add_flags(p)
    spread.add_argument("--verify", nargs="?", const=VERIFIED, type=flags.integer(1), metavar="N",
                        help="train the same in one process beside it, and compare after each "
                             f"of N steps, each from the same start (default {VERIFIED})")
    spread.add_argument("--audit", action="store_true",
                        help="list how every parameter lies on the ranks")
    resume.add_flags(p)
    output = p.add_argument_group("output")
    output.add_argument("--sample", type=flags.integer(0), default=200, metavar="N",
                        help="characters to write at the end (default 200)")
    output.add_argument("--out", default="out", metavar="DIR",
                        help="for loss.png and checkpoints (default out)")
    output.add_argument("--no-figure", action="store_true", help="draw nothing")
    output.add_argument("--json", metavar="FILE", help="write what was printed, as data")
    output.add_argument("--trace", metavar="FILE", help="write the ranks' last step, and a "
                        "pipeline's plan, for ui.perfetto.dev")
    return p


def options(argv=None):
    """Read the flags and fill in what follows from others.  -> named tuple, so nobody changes it"""
    args, found = parser().parse_args(argv), None
    if args.resume:
        args, found = resume.again(parser(), argv, parallel.running())
    if args.verify and args.dtype == "float32":
        raise BadInput("--verify compares in float64, where 1e-11 is far above rounding and far "
                       "below any mistake; leave out --dtype float32")
    if args.precision and args.dtype and not (args.verify or found):
        raise BadInput(f"--precision {args.precision} says what is computed in; leave out --dtype")
    if args.grad_accum is None:
        stages = args.pp if args.pp and args.pp > 1 else 0
        args.grad_accum = max(1, min(4 * stages, args.batch // (args.dp or 1)))
    if args.grad_accum > args.batch:
        raise BadInput(f"{args.batch} sequences do not fill {args.grad_accum} pieces; use "
                       f"--grad-accum 1 to {args.batch}")
    args.dtype = args.dtype or ("float64" if args.verify else "float32")
    if found is None:
        args.eps = verify.ADAMW_EPS if args.verify else 1e-8
    args.found = found
    return namedtuple("Options", vars(args))(**vars(args))


# ------------------------------------------------------------------------------ the run

@dataclass(frozen=True)
class Run:
    """Hold what training works on."""
    corpus: Corpus
    config: gpt.GPTConfig
    mesh: DeviceMesh
    model: object
    optimizer: object
    twin: verify.Twin | None                                # the same training in one process
    history: History
    recorder: Recorder | None                               # of what --trace writes


def build(o):
    """Make everything the run needs; raise BadInput for what cannot be made."""
    mesh = parallel.make_mesh(o)
    text = parallel.agreed(mesh.world, lambda: look_around(o, mesh.world.rank))
    parallel.alike(mesh.world, text=text, command=repr(o))
    corpus = Corpus(text, models.sizes(o)["context"])
    config = models.configure(o, corpus.vocab)
    rows = -(-o.batch // (mesh.sizes["dp"] * o.grad_accum))
    ledger.refuse_too_large(sizes(o, config, B=rows, w=np.dtype(o.dtype).itemsize), o.batch)
    model, optimizer, twin = assemble(o, config, mesh)
    run = Run(corpus, config, mesh, model, optimizer, twin, History(),
              Recorder(model, mesh) if o.trace else None)
    if o.found:
        resume.go_on(o.found, run)
    return run


def assemble(o, config, mesh, prepare=lambda model: model):
    """Spread a model, equip its optimizer, and with --verify make a twin of both.  Collective

    prepare(plain model) -> it, changed.  -> model, optimizer, twin or None"""
    parallel.refuse_uneven_passes(o, mesh)

    def made():
        return prepare(models.plain(o, config))

    optimizer = partial(models.make_optimizer, o=o, config=config)
    model = parallel.spread(made(), mesh, o.sp, attention=o.attention, method=o.cp_method,
                            schedule=o.schedule, chunks=o.chunks, zero=o.zero, recompute=
                            o.recompute, precision=o.precision, compress=o.compress,
                            compress_after=o.compress_after)
    twin = verify.Twin(lambda: precision.use(made(), o.precision),
                       lambda params: precision.attach(optimizer(params), o.precision),
                       mesh) if o.verify else None
    return model, parallel.equip(optimizer(model.parameters()), model, mesh, o.offload), twin


def look_around(o, rank):
    """Read the text, and see that what will be written can be.  -> text"""
    if rank == 0:
        resume.refuse_mixture(o)
        latest = Path(o.out) / "latest" if o.save_every else None
        files.ready(*outputs(o), latest, keep=[o.text])
        if not o.no_figure:
            files.drawable()
    return default_text() if o.text is None else read_text(o.text)


def outputs(o):                                             # data, trace, picture
    return o.json, o.trace, None if o.no_figure else Path(o.out) / "loss.png"


def fit(run, o, history, listeners):
    """Train.  Every listener hears of every step; one that answers False ends the training.

    So do numbers that are none: history.trouble says which, and nothing has changed by them."""
    recorder = run.recorder
    recorded, passes = (recorder.step, recorder.passes) if recorder else (nullcontext, None)
    for step in range(len(history.losses), o.steps):
        began = time.perf_counter()
        batch = run.corpus.batch(o.batch, o.seed, step)
        try:
            with recorded():
                result = train_step(run.model, batch, run.optimizer, run.mesh, o.grad_accum,
                                    max_norm=o.clip or None, passes=passes)
        except FloatingPointError as error:
            history.trouble = f"step {step}: {error}"
            break
        history.add(result, time.perf_counter() - began)
        if False in [hear(step, batch, result) for hear in listeners]:
            break


def train(run, o, progress, history):
    """Train, and on the way validate, show, save, and compare with the twin."""
    due = {o.steps * i // VALIDATIONS for i in range(1, VALIDATIONS + 1)}

    def validate():
        history.validated(validation_loss(run, o))
        progress.mark(history)
        if not np.isfinite(history.val_losses[-1]) and not history.trouble:
            history.trouble = (f"step {history.val_steps[-1]}: the loss on the text kept for "
                               f"validation is {history.val_losses[-1]}")

    def show(step, batch, result):
        progress.move(history)
        if step + 1 in due:
            validate()
        return not history.trouble

    if not history.val_steps:
        validate()
    fit(run, o, history, [show, resume.saver(run, o), comparer(run, o)])
    if history.val_steps[-1] < len(history.losses):         # the twin has ended it early
        validate()


def comparer(run, o):
    """Make the listener that compares the first steps with the twin's."""
    begun = len(run.history.losses)

    def compare(step, batch, result):
        return step - begun >= (o.verify or 0) or run.twin.check(
            result, run.model, run.optimizer, batch, o.clip or None).equal
    return compare


def validation_loss(run, o):
    """Measure the mean loss on text that is never trained on, always the same windows."""
    loss = count = 0
    with no_grad():
        for i in range(VALIDATION_BATCHES):
            batch = run.model.localize(run.corpus.batch(o.batch, o.seed, i, "val"))
            loss += run.model(batch).item()
            count += batch.count
    loss, count = summed(loss, count, run.mesh)
    return loss / count


def whole(run, o):
    """Gather the trained parameters into a plain model.  Collective."""
    trained = everything(run.model.parameters(), run.mesh)
    model = models.plain(o, run.config)
    for p in model.parameters():
        p.data[...] = trained[p.name]
    return model


def sample(model, corpus, o):
    """Let the model write on from a line break, or from the first character it knows."""
    start = corpus.encode("\n") if "\n" in corpus.ids else [0]
    rng = np.random.default_rng([o.seed, 1])
    return corpus.decode(gpt.generate(model, start, o.sample, rng)[1:])


# ------------------------------------------------------------------------------ what is shown

def headline(run, o):
    """Say in two lines, or three with experts, what is about to be trained on what."""
    c = run.config
    size = sizes(o, c)
    experts = (f"{size.E} experts, {size.k} for each token, which so meets "
               f"{cost.active_parameters(size):,} parameters\n" if size.E else "")
    return (f"{o.preset}: {c.layers} layers of width {c.width}, {c.heads} heads, "
            f"{cost.gpt_parameters(size):,} parameters in {o.precision or o.dtype}\n"
            f"{experts}{o.text or 'Unicode names'}: {len(run.corpus.tokens):,} characters, "
            f"{c.vocab} different; {o.batch} x {c.context} tokens per step, on "
            f"{run.mesh.describe()}")


def sizes(o, config, **others):
    """Say how large the model is, for the formulas of cost."""
    return cost.Sizes.of(config, **(moe.asked(o).sizes() if o.experts else {}), **others)


# ------------------------------------------------------------------------------ the command

def main():
    o = options()
    try:
        return command(o)
    except MemoryError as error:
        raise BadInput(f"not enough memory: {error}; use a smaller --batch, --width or --layers, "
                       "or more --grad-accum") from None


def command(o):
    """Train as the options say, and tell what came out.  -> exit status"""
    run = build(o)
    history = run.history
    if first := run.mesh.world.rank == 0:
        print(headline(run, o) + resume.told(o.found))
        if o.audit:
            print("\n" + audit(run.model.parameters()) + "\n")
    with Progress(o.steps, first) as progress, np.errstate(over="ignore", invalid="ignore"):
        try:
            train(run, o, progress, history)
        except KeyboardInterrupt:
            if first:
                files.attempt(o.json, files.numbers(report(o, history)))
            raise
    model, spans = whole(run, o), run.recorder.spans() if run.recorder else []
    verdict = run.twin.verdict if run.twin else None
    status = finish(run, o, history, verdict, model, spans) if first else 0
    if history.trouble:
        raise BadInput(f"{history.trouble}; use a smaller --lr than the "
                       f"{run.optimizer.rate or 0:.2g} of the step before")
    return status or int(verdict is not None and not verdict.equal)


def finish(run, o, history, verdict, model, spans):
    """Print and write what has come out.  -> exit status"""
    moved, fingerprint = o.offload and run.optimizer.offload.account(), digest(model)
    text = "" if history.trouble else sample(model, run.corpus, o)
    print(f"\n{text}\n" if text else "")
    print(f"parameters sha256 {fingerprint}")
    if moved:
        print("offload    this rank: " + ", ".join(f"{n:,} bytes {what}"
                                                   for what, n in moved.items()))
    data, traced, picture = outputs(o)
    found = report(o, history, verdict, text, fingerprint) | {"offload": moved}
    status = files.deliver(("data", data, files.numbers(found)),
                           ("trace", traced, files.numbers(chrome(spans))),
                           ("picture", picture, files.picture(draw, history, size=(7, 4))))
    if o.save_every:
        print(f"latest     {resume.latest(o)}")
    if verdict:
        print(f"compared   {verdict.steps} of {len(history.losses)} steps with one process: "
              f"loss, every gradient, every parameter\n{verdict.line()}")
    return status


if __name__ == "__main__":
    launch.run(main)
