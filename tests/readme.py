"""Keep the README true: its outputs and its picture come from here.

    python -m tests.readme              runs what the README shows, rewrites it where it differs
    python -m tests.readme --picture    draws its picture anew, too

A block under `<!-- output head=9 tail=4: COMMAND -->` holds the first and last lines that COMMAND
prints; `the Python above` stands for the README's program in Python.
"""
import json
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

from minidist.ranks import environment
from tests.mpi import HANG, execute

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PICTURE = ROOT / "lessons" / "curves.png"
BLOCK = re.compile(r"<!-- output (?P<cut>[^:>]*): (?P<command>.+?) -->\n```\n(?P<text>.*?)```",
                   re.S)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
COMMAND = re.compile(r"^    (?P<command>(?:python3?|mpirun|\.venv/bin/\w+) .+)$", re.M)
# What differs between machines: times, speeds, the last bits of sums and what is made from them.
MACHINE = re.compile(r"\d[\d,.]* ?(ms|us|s|min|%|tokens/s|GFLOP/s|GB/s)(?!\w)|\d+:\d+ left"
                     r"|\b[0-9a-f]{64}\b|\b\d\.\de-1\d\b")


def blocks():
    """List the README's blocks of output.  -> [(command, cut, text)]"""
    return [(m["command"], m["cut"], m["text"]) for m in BLOCK.finditer(README.read_text())]


def commands():
    """List every command that the README tells its reader to type."""
    return [m["command"] for m in COMMAND.finditer(README.read_text())]


def here(command):
    """Translate a command of the README to this environment.  -> argv"""
    if command == "the Python above":
        return [sys.executable, "-c", PYTHON.search(README.read_text())[1]]
    own = {"python": sys.executable, "mpirun": environment.mpiexec() or "mpirun"}
    return [own.get(word, word) for word in shlex.split(command)]


def run(command, out=None):
    """Run a command of the README, its pictures into the folder `out`; return what it prints."""
    argv = here(command) + (["--out", str(out)] if out else [])
    status, output = execute(argv, timeout=HANG)
    if status:
        raise RuntimeError(f"{command}: status {status}\n{output}")
    return output.replace(f"{out}/", "out/")


def excerpt(output, cut):
    """Keep the first `head` and the last `tail` lines of an output, as the README shows it."""
    keep = dict(re.findall(r"(head|tail)=(\d+)", cut))
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    head, tail = int(keep.get("head", len(lines))), int(keep.get("tail", 0))
    if head + tail < len(lines):
        lines = lines[:head] + ["..."] + (lines[-tail:] if tail else [])
    return "\n".join(lines) + "\n"


def masked(text):
    """Replace what a machine's speed decides, and the spaces that align it."""
    return re.sub(r" +", " ", MACHINE.sub("_", text))


LAYOUTS = [
    (2, "--dp 2"), (3, "--dp 3 --zero 3"), (2, "--tp 2 --sp"), (2, "--cp 2"), (4, "--pp 4"),
    (4, "--dp 2 --tp 2 --zero 3 --recompute blocks"), (8, "--dp 2 --pp 2 --tp 2 --zero 1")]


def draw(steps=300):
    """Draw the README's picture: the same training in one process, and spread in many ways.

    Each layout's curve is a dash of its colour in turn, so that all of them can be seen."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    train = (f"python -m minidist.train --preset lesson --dtype float64 --lr 0.004 "
             f"--steps {steps} --sample 0")
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    with tempfile.TemporaryDirectory() as folder:
        def losses(command):
            run(f"{command} --no-figure --json {folder}/run.json")
            return json.loads(Path(folder, "run.json").read_text())["losses"]
        axes.plot(range(1, steps + 1), losses(train), lw=8, color="0.85", label="one process")
        for i, (ranks, flags) in enumerate(LAYOUTS):
            axes.plot(range(1, steps + 1), losses(f"mpirun -n {ranks} {train} {flags}"), lw=2.4,
                      color=f"C{i}", ls=(3 * i, (3, 3 * len(LAYOUTS) - 3)),
                      label=f"{ranks} ranks: {flags}")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per character)", xlim=(0, steps))
    for line in axes.legend(frameon=False, fontsize=9).get_lines():
        line.set_linestyle("-")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=110)


def shown(block, output):
    """Give a block its command's output; keep the text if only speed and rounding differ."""
    new = excerpt(output, block["cut"])
    return block[0] if masked(new) == masked(block["text"]) else (
        block[0][:block.start("text") - block.start()] + new + "```")


def rewrite():
    """Put today's outputs into the README."""
    text = README.read_text()
    with tempfile.TemporaryDirectory() as folder:
        text = BLOCK.sub(lambda m: shown(m, run(m["command"], folder)), text)
    changed = text != README.read_text()
    README.write_text(text)
    return changed


if __name__ == "__main__":
    os.chdir(ROOT)
    if "--picture" in sys.argv:
        draw()
    print("README.md rewritten" if rewrite() else "README.md was true already")
