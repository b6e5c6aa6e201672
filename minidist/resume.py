"""Resume: how a training run saves itself, and how another one goes on from there.

    train --save-every K    saver -> checkpoint.save, with what else is needed: flags, the
                            characters, the text's checksum, the curve so far
    train --resume DIR      again: flags that decide the result are as they were, or refused
                            go_on: model, optimizer, twin and curve are as they were

The layout is free: a run that began on dp=4 may go on on tp=2 x pp=2.

Lesson: mpirun -n 4 python -m lessons.checkpoint
"""
import sys
from dataclasses import asdict
from pathlib import Path

from minidist import BadInput, flags, storage
from minidist.checkpoint import find, load, save

# Flags that only change where and how things are computed; those that decide the result are kept.
FREE = set("""dp cp tp pp ep zero sp cp_method attention recompute schedule chunks grad_accum
              offload text verify audit sample out no_figure json trace save_every keep resume
              found""".split())


def add_flags(parser):
    """Add the flags of saving and going on."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save-every", type=flags.integer(1), metavar="K",
                       help="save a checkpoint in --out after every K steps, and after the last")
    group.add_argument("--keep", type=flags.integer(1), metavar="N",
                       help="leave only the newest N there (default: all)")
    group.add_argument("--resume", metavar="DIR",
                       help="go on from the latest checkpoint in a directory, or from a certain "
                            "one, on any mesh; what is trained, on what and how is as it was")


def again(parser, argv, world):
    """Read the flags of a run that goes on: what decides the result is as it was.  Collective

    -> flags, Found"""
    found = find(parser.parse_args(argv).resume, world)
    before = found.index["about"].get("flags")
    if before is None:
        raise BadInput(f"{found.path} was not saved by minidist.train, so it does not say how to "
                       "go on")
    parser.set_defaults(**before, out=str(found.path.parent))
    args = parser.parse_args(argv)
    for name, value in before.items():
        if name not in FREE and getattr(args, name) != value:
            was = "it was not given" if value is None else f"it was {value}"
            raise BadInput(f"--{name.replace('_', '-')} is {getattr(args, name)}, and for "
                           f"{found.path} {was}: that would be another training; leave the flag "
                           "out, or start anew without --resume")
    if args.verify and args.dtype == "float32":
        raise BadInput(f"{found.path} was trained in float32, and --verify compares in float64; "
                       "leave out --verify")
    return args, found


def told(found):
    """Say from where a run goes on, and what was passed over.  -> lines, each after a line break"""
    if found is None:
        return ""
    return (f"\ngoing on from {found.path}, saved on {found.index['mesh']}"
            + "".join(f"\npassed over: {line}" for line in found.refused))


def latest(o):
    """Name the checkpoint from which a run could go on now."""
    paths = storage.candidates(Path(o.out))[0]
    return paths[0] if paths else "no checkpoint could be saved"


def go_on(found, run):
    """Put a run, and its twin, where a checkpoint was saved.  Collective"""
    about = found.index["about"]
    if about["text"] != run.corpus.sha256:
        raise BadInput(f"the text is not the one that {found.path} was trained on; give that one "
                       "with --text FILE")
    load(found, run.model, run.optimizer, run.mesh)
    vars(run.history).update(about["history"])
    if run.twin and run.mesh.world.rank == 0:
        load(found, run.twin.model, run.twin.optimizer)
        run.twin.start = run.twin.numbers()


def saver(run, o):
    """Make a listener that saves after every so many steps, and after the last.  Collective

    A save that fails is a warning: the training is worth more than one of its checkpoints."""
    def hear(step, batch, result):
        done = step + 1
        due = o.save_every and (done % o.save_every == 0 or done == o.steps)
        if due and not run.history.trouble:
            try:
                save(o.out, run.model, run.optimizer, run.mesh, done, about(run, o), o.keep)
            except BadInput as error:
                if run.mesh.world.rank == 0:
                    print(f"warning: {error}; the training goes on", file=sys.stderr)
    return hear


def about(run, o):
    """Note what a run that goes on, or samples, will need beside the tensors."""
    return {"flags": {name: value for name, value in o._asdict().items() if name == "text" or
                      name not in FREE}, "characters": "".join(run.corpus.characters),
            "text": run.corpus.sha256, "history": asdict(run.history)}


def refuse_mixture(o):
    """Raise BadInput if this run would save among the checkpoints of another one."""
    there = storage.committed(Path(o.out)) if o.save_every else []
    if there and (o.found is None or o.found.path.parent.resolve() != Path(o.out).resolve()):
        raise BadInput(f"{o.out} holds {there[0].name} of another run; go on from it with --resume "
                       f"{o.out}, or use another --out")
