"""Parallel: from flags to a mesh, and to a model that is spread over it.

    --dp 4            4 replicas, each on its rows of the batch          minidist.dp
    --zero 3          and what they hold is held once, in pieces         minidist.zero
    --dp 4 --ep 2     of the replicas, 2 share the experts               minidist.ep
    --tp 2            2 ranks share every layer                          minidist.tp
    --tp 2 --sp       and the tokens between the layers                  minidist.sp
    --cp 2            2 ranks share the tokens of every row              minidist.cp
    --attention tiled attention without a T x T matrix                   minidist.flash
    --pp 4            4 ranks, each with some of the layers              minidist.pp
    --recompute sqrt  keep less of the forward, compute it again         minidist.recompute
    --offload DIR     optimizer state in a file, here chunk by chunk     minidist.offload
    --precision fp16  parameters, activations, messages of 16 bits       minidist.precision
    --compress topk   gradients summed about, in fewer bytes             minidist.compress

Strategies are functions on models, so composing them is applying one after another, always in the
order of STRATEGIES; what does not go together is refused, see pairs. The product of all sizes is
the number of ranks; replicas take the ranks that the other axes leave.

Run: python -m minidist.train -n 4 --dp 4 --verify
"""
import hashlib
import math
from functools import partial

from minidist import (BadInput, compress, cp, ep, flags, flash, moe, offload, pairs, pp, precision,
                      recompute, schedules, sp, tp, zero)
from minidist.dp import DistributedDataParallel
from minidist.mesh import AXES, DeviceMesh, notes
from minidist.ranks import comm, environment

OFFERED = "dp", "cp", "tp", "pp"        # the axes over which a model can be spread


def add_flags(parser):
    """Add one flag for the size of each axis."""
    group = parser.add_argument_group("parallel")
    for axis in OFFERED:
        group.add_argument(f"--{axis}", type=flags.integer(1), metavar="N", help=AXES[axis].help)
    group.add_argument("--ep", type=flags.integer(1), metavar="N", help=AXES["ep"].help)
    group.add_argument("--sp", nargs="?", const="again", choices=["again", "keep"],
                       help="share the tokens between the layers too, over the ranks of --tp; "
                            "keep: remember a layer's whole input, rather than gather it again")
    group.add_argument("--cp-method", choices=list(cp.METHODS), default="zigzag",
                       help="keys go around a ring, tokens in order or in zigzag, or heads are "
                            "exchanged for tokens (default zigzag)")
    group.add_argument("--attention", choices=["full", "tiled"], default="full",
                       help="tiled: never hold a T x T matrix, compute scores again in backward; "
                            "rings are always tiled (default full)")
    group.add_argument("--schedule", choices=[*schedules.ORDERS], metavar="NAME",
                       help=f"of the stages of --pp: {', '.join(schedules.ORDERS)} (default 1f1b)")
    group.add_argument("--chunks", type=flags.integer(1), metavar="V",
                       help="stages on each rank of --pp (default: as few as the schedule allows)")
    add_memory_flags(group)
    return group


def add_memory_flags(group):
    """Add the flags of what holds less and pays for it otherwise."""
    group.add_argument("--zero", type=int, choices=[1, 2, 3], metavar="1|2|3",
                       help="hold optimizer state (1), gradients too (2), parameters too (3) once "
                            "over the ranks of --dp, in pieces")
    group.add_argument("--recompute", choices=recompute.WHAT,
                       help="compute again in backward, rather than keep: every block, segments of "
                            "sqrt(layers) blocks, or only the core of attention")
    group.add_argument("--offload", metavar="DIR",
                       help="keep optimizer state, and with --zero 3 parameters, in a file in DIR "
                            "that is gone when the run ends; it passes by in chunks")
    group.add_argument("--compress", metavar="FORM",
                       help="send less of each gradient, and the rest later: fp16, 1bit, "
                            "topk:FRACTION (topk alone: 0.01) or powersgd:RANK (2)")
    group.add_argument("--compress-after", type=flags.integer(1), metavar="N",
                       help="steps that are summed plainly before (default 0)")
    group.add_argument("--precision", choices=precision.FORMS,
                       help="parameters and activations of 16 bits, masters of 32; fp16 scales "
                            "its losses, bf16 lies in float32 arrays, for NumPy has none")


def running():
    """All ranks that have been started with this one."""
    return comm.world() if environment.launched() else comm.solo()


def make_mesh(args, world=None):
    """Lay the running ranks out as the flags say; BadInput if they do not fit.  Collective."""
    world = world or running()
    return DeviceMesh(world, **axis_sizes(args, world.size), ep=getattr(args, "ep", None) or 1)


def agreed(world, look):
    """Call look() on every rank; what one refuses, all refuse.  Collective  -> its result"""
    result, trouble = None, None
    try:
        result = look()
    except BadInput as error:
        trouble = str(error)
    said = notes(trouble, world)
    for rank, sentence in enumerate(said):
        if sentence:
            raise BadInput(sentence + f" (on rank {rank})" * (None in said and world.size > 1))
    return result


def alike(world, **given):
    """Refuse to begin unless all ranks were given the same.  Collective.  given: text by name"""
    mine = {what: hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]
            for what, text in given.items()}
    first, *others = notes(mine, world)
    for rank, theirs in enumerate(others, 1):
        for what in mine:
            if theirs[what] != first[what]:
                raise BadInput(f"rank {rank} has another {what} than rank 0 (sha256 {theirs[what]} "
                               f"and {first[what]}); give all ranks the same")


def axis_sizes(args, ranks):
    """Work out how many ranks each axis has; BadInput for flags that do not go together."""
    sizes = {axis: getattr(args, axis) or 1 for axis in OFFERED}
    if args.dp is None:
        sizes["dp"] = max(1, ranks // math.prod(sizes.values()))
    if args.sp and sizes["tp"] == 1:
        raise BadInput("--sp shares tokens over the ranks of --tp, and there is 1; use --tp 2 "
                       "or more, or leave out --sp")
    if sizes["pp"] == 1 and (getattr(args, "schedule", None) or getattr(args, "chunks", None)):
        raise BadInput("--schedule and --chunks say how the stages of --pp take turns, and there "
                       "is 1; use --pp 2 or more")
    refuse_no_experts(args)
    pairs.refuse(args, sizes)
    refuse_compression(args, sizes)
    if args.batch < sizes["dp"]:
        raise BadInput(f"{args.batch} sequences do not give each of {sizes['dp']} replicas one; "
                       f"use --batch {sizes['dp']} or more")
    return sizes


def refuse_no_experts(args):
    """Raise BadInput for flags about experts without any."""
    if not getattr(args, "experts", None):
        given = [name for name in ("ep", "top_k", "capacity", "balance", "shared_expert")
                 if getattr(args, name, None) is not None and (name, args.ep) != ("ep", 1)]
        if given:
            raise BadInput(f"--{given[0].replace('_', '-')} is about experts, and this model has "
                           "none; use --experts E")


UNCOMPRESSED = {        # what does not go with --compress, and why
    "tp": "ranks of --tp hold parameters in common, and would leave out other parts of each",
    "pp": "both ends of --pp hold the words, and would leave out other parts of them",
    "cp": "ranks of --cp add up gradients that were summed about, each with another rest",
    "ep": "the experts of --ep are summed after backward, in no bucket",
    "zero": "--zero sums gradients in pieces, and no rank has a whole bucket",
    "precision": "--precision skips steps that overflow, and what is left out would be infinite",
    "verify": "what --verify would compare is another training, on purpose",
    "save_every": "a checkpoint holds nothing that belongs to one rank alone, such as its rest",
    "resume": "a checkpoint holds nothing that belongs to one rank alone, such as its rest"}


def refuse_compression(args, sizes):
    """Raise BadInput for a form that is unknown, or beside what it does not go with."""
    if not getattr(args, "compress", None):
        if getattr(args, "compress_after", None):
            raise BadInput("--compress-after says when --compress begins, which is not given")
        return
    compress.make(args.compress)
    for name, reason in UNCOMPRESSED.items():
        if sizes[name] > 1 if name in sizes else getattr(args, name, None):
            raise BadInput(f"{reason}; leave out --{name.replace('_', '-')}, or --compress")
    if sizes["dp"] == 1:
        raise BadInput("--compress makes messages between replicas smaller, and there is 1; use "
                       "--dp 2 or more")


def refuse_uneven_passes(args, mesh):
    """Raise BadInput where experts see other tokens together than in one process, by --verify."""
    passes = args.grad_accum * (mesh["dp", "cp"].size if args.capacity else 1)
    if args.verify and passes > 1 and (args.capacity or args.balance == "aux"):
        what = "--capacity" if args.capacity else "--balance aux"
        raise BadInput(f"{what} counts the tokens of a pass, and {passes} passes make up a step "
                       "that one process takes in one; leave out --verify, or use --balance bias "
                       "without --capacity")


def spread(model, mesh, sequence=None, **options):
    """Apply to a plain model every strategy that the mesh and the options ask for.  Collective.

    sequence: what --sp says; None: no sequence parallelism.  attention, method, zero: what
    --attention, --cp-method and --zero say.  recompute: what --recompute
    says.  schedule, chunks: see pp.split.  precision, compress, compress_after: what these say."""
    for strategy in STRATEGIES:
        model = strategy(model, mesh, dict(options, sequence=sequence))
    return model


def tiles(model, mesh, options):
    """Compute attention in tiles."""
    return flash.use(model) if options.get("attention") == "tiled" else model


def tensor(model, mesh, options):
    """Share every layer over tp, and with --sp the tokens between the layers."""
    comm, sequence = mesh["tp"], options["sequence"]
    if comm.size == 1:
        return model
    if not sequence:
        return tp.parallelize(model, comm)
    sp.refuse_uneven_tokens(model.config.context, comm.size, mesh["cp"].size)
    tp.parallelize(model, comm, sp.enter, sp.leave)
    return sp.parallelize(model, comm, keep_input=sequence == "keep")


def experts(model, mesh, options):
    """Share out the experts over ep, if there are any, and let routers count all tokens."""
    return ep.parallelize(model, mesh["ep"]) if moe.mixtures(model) else model


def context(model, mesh, options):
    """Share the tokens of every row over cp."""
    if mesh["cp"].size == 1:
        return model
    return cp.parallelize(model, mesh["cp"], options.get("method", "zigzag"))


def stages(model, mesh, options):
    """Keep the layers of my stages of pp."""
    if mesh["pp"].size == 1:
        return model
    return pp.split(model, mesh["pp"], options.get("schedule") or "1f1b", options.get("chunks"))


def half(model, mesh, options):
    """Hold and compute in 16 bits: with the layers that are mine, before buckets are made."""
    return precision.use(model, options.get("precision"))


def again(model, mesh, options):
    """Compute again in backward what forward does not keep: inside of ZeRO, so that it sees one
    forward and one backward of each part."""
    what = options.get("recompute")
    return recompute.parallelize(model, what) if what else model


def replicas(model, mesh, options):
    """Share the rows of a batch over dp, with --zero what is held as well."""
    if mesh["dp"].size == 1:
        return model
    if stage := options.get("zero"):
        return zero.parallelize(model, mesh["dp"], stage)
    model = DistributedDataParallel(model, mesh["dp"])
    if options.get("compress"):
        compress.use(model, options["compress"], options.get("compress_after") or 0)
    return model


def equip(optimizer, model, mesh=None, folder=None):
    """Let an optimizer write what this rank is responsible for.  -> the optimizer

    folder: where its state lies, and what ZeRO's stage 3 holds; None: here.  Collective"""
    if hasattr(model, "gather_all"):
        zero.attach(optimizer, model)
    if folder:
        offload.attach(optimizer, model, partial(offload.File, folder=folder), mesh and mesh.world)
    return precision.attach(optimizer, getattr(model, "precision", None))


# In the order in which they are applied to a plain model.
STRATEGIES = [tiles, tensor, experts, context, stages, half, again, replicas]
