"""Bench: measure, always beside a reference and in turn with it, because machines are noisy.

    python -m minidist.bench engine            one training step, beside PyTorch's
    python -m minidist.bench collectives -n 4  every algorithm, beside MPI's own
    python -m minidist.bench train             tokens/s on 1, 2 and 4 ranks, beside PyTorch DDP
    python -m minidist.bench attention         plain, tiled, PyTorch's; a ring over ranks
    python -m minidist.bench memory            recomputation and offload, beside a plain step
    python -m minidist.bench moe -n 2          a layer of experts, beside a dense one; losses
    python -m minidist.bench tp                one layer over 2 ranks, beside one rank

Every table says what it ran on; none is asserted by a test.

Lesson: mpirun -n 4 python -m lessons.walls
"""
import sys
from importlib import import_module
from importlib.util import find_spec

from minidist import BadInput
from minidist.ranks import launch

PARTS = "engine", "attention", "collectives", "memory", "train", "moe", "tp"


def main():
    """Hand over to the part that the first word names."""
    there = [part for part in PARTS if find_spec(f"minidist.bench.{part}")]
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word in ("", "-h", "--help"):
        print(__doc__.rsplit("\n\n", 2)[0])
        return 0
    if word not in there:
        raise BadInput(f"no benchmark {word}; there are {', '.join(there)}")
    del sys.argv[1]
    return import_module(f"minidist.bench.{word}").main()


if __name__ == "__main__":
    launch.run(main)
