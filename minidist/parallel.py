"""Parallel: from flags to a mesh, and to a model that is spread over it.

    --dp 4            4 replicas, each on its rows of the batch          minidist.dp
    --tp 2            2 ranks share every layer                          minidist.tp
    --tp 2 --sp       and the tokens between the layers                  minidist.sp

Strategies are functions on models, so composing them is applying one after another, always in
the order in which `spread` names them. The product of all sizes is the number of ranks; replicas
take the ranks that the other axes leave.

Run: python -m minidist.train -n 4 --dp 4 --verify
"""
import math

from minidist import BadInput, flags, sp, tp
from minidist.dp import DistributedDataParallel
from minidist.mesh import DeviceMesh
from minidist.ranks import comm, environment

AXES = {"dp": "replicas of the model (default: all ranks that are left)",
        "tp": "ranks that share every layer (default 1)"}


def add_flags(parser):
    """Add one flag for the size of each axis."""
    group = parser.add_argument_group("parallel")
    for axis, what in AXES.items():
        group.add_argument(f"--{axis}", type=flags.integer(1), metavar="N", help=what)
    group.add_argument("--sp", nargs="?", const="again", choices=["again", "keep"],
                       help="share the tokens between the layers too, over the ranks of --tp; "
                            "keep: remember a layer's whole input, rather than gather it again")
    return group


def make_mesh(args, world=None):
    """Lay the running ranks out as the flags say; BadInput if they do not fit.  Collective."""
    world = world or (comm.world() if environment.launched() else comm.solo())
    sizes = {axis: getattr(args, axis) or 1 for axis in AXES}
    if args.dp is None:
        sizes["dp"] = max(1, world.size // math.prod(sizes.values()))
    if args.sp and sizes["tp"] == 1:
        raise BadInput("--sp shares tokens over the ranks of --tp, and there is 1; use --tp 2 "
                       "or more, or leave out --sp")
    if args.batch < sizes["dp"]:
        raise BadInput(f"{args.batch} sequences do not give each of {sizes['dp']} replicas one; "
                       f"use --batch {sizes['dp']} or more")
    return DeviceMesh(world, **sizes)


def spread(model, mesh, sequence=None):
    """Apply to a plain model every strategy whose axis is longer than 1.  Collective.

    sequence: what --sp says; None: no sequence parallelism."""
    if mesh.sizes["tp"] > 1 and sequence:
        tp.parallelize(model, mesh["tp"], sp.enter, sp.leave)
        sp.parallelize(model, mesh["tp"], keep_input=sequence == "keep")
    elif mesh.sizes["tp"] > 1:
        tp.parallelize(model, mesh["tp"])
    if mesh.sizes["dp"] > 1:
        model = DistributedDataParallel(model, mesh["dp"])
    return model
