"""Flags of commands: a mistake is one sentence, said once, whatever the number of ranks.

    flags.Parser          argparse, but a wrong flag raises BadInput, and one rank prints the help
    flags.add_training(p) the flags that say what is trained, on what, and how
    flags.integer(1)      type=: an integer of at least 1
    flags.real(0)         type=: a finite number of at least 0
"""
import argparse
import math

from minidist import BadInput
from minidist.ranks import environment

SIZES = "context", "width", "heads", "layers", "kv_heads"              # of a model


class Parser(argparse.ArgumentParser):
    """Parse flags, none of them abbreviated."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        raise BadInput(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def print_help(self, file=None):
        if environment.rank() == 0:
            super().print_help(file)


def integer(low, high=2 ** 63 - 1):
    """Make a type= for integers from low to high."""
    def parse(text):
        if not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} is out of range, use {low} or more"
                                             if int(text) < low else
                                             f"{text} is out of range, use {high} or less")
        return int(text)
    parse.__name__ = "integer"                              # argparse names it in its message
    return parse


def real(low):
    """Make a type= for finite numbers of at least low."""
    def parse(text):
        if not low <= float(text) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is out of range, use {low} or more")
        return float(text)
    parse.__name__ = "number"
    return parse


# ------------------------------------------------------------------------ what is trained

def add_training(parser):
    """Add the flags that say what is trained, on what, and how: all that decides the result."""
    add_model(parser.add_argument_group("model"))
    add_data(parser.add_argument_group("data"))
    add_optimizer(parser.add_argument_group("training"))


def add_model(group):
    group.add_argument("--preset", default="nano", help="lesson, nano or mini (default nano)")
    for name in SIZES:
        group.add_argument("--" + name.replace("_", "-"), type=integer(1, 10 ** 6), metavar="N",
                           help="replace the preset's")
    add_experts(group)
    group.add_argument("--dropout", type=real(0), default=0.0, metavar="P", help="default 0")
    group.add_argument("--dtype", choices=["float32", "float64"],
                       help="default float32; with --verify float64")


def add_experts(group):
    group.add_argument("--experts", type=integer(1), metavar="E",
                       help="replace each MLP by E of its size, of which a router chooses some for "
                            "each token")
    group.add_argument("--top-k", type=integer(1), metavar="K",
                       help="experts for each token (default 2)")
    group.add_argument("--capacity", type=real(0), metavar="C",
                       help="an expert has places for C times an even share of the tokens; others "
                            "are dropped (default: places for all)")
    group.add_argument("--balance", choices=["aux", "bias", "none"],
                       help="what evens the experts out: a loss, a bias on the choice alone, or "
                            "nothing (default bias)")
    group.add_argument("--shared-expert", action="store_true", default=None,
                       help="one more MLP, for all tokens")


def add_data(group):
    group.add_argument("--text", metavar="FILE", help="UTF-8 text (default: Unicode names)")
    group.add_argument("--batch", type=integer(1), default=12, metavar="B",
                       help="sequences per step (default 12)")
    group.add_argument("--grad-accum", "--microbatches", type=integer(1), metavar="M",
                       help="work through the batch in M pieces: less memory, the same training; "
                            "with --pp, the micro-batches (default 1; with --pp, 4 per stage)")
    group.add_argument("--seed", type=integer(0), default=0, metavar="S",
                       help="of initial values, batches, dropout and sample (default 0)")


def add_optimizer(group):
    group.add_argument("--steps", type=integer(1), default=500, metavar="N", help="default 500")
    group.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    group.add_argument("--lr", type=real(0), metavar="RATE",
                       help="peak learning rate (default: 0.75 / width; for sgd 0.5)")
    group.add_argument("--clip", type=real(0), default=1.0, metavar="NORM",
                       help="largest gradient norm, 0: any (default 1)")
