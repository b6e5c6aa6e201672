"""Kill a training while it saves, again and again: what it leaves must always be a right state.

    python -m tests.kill_saves -k 100 -n 2 --seed 0

A run without kills tells what each step's checkpoint must be, bit by bit.  Then a job saves after
every step; at a random moment of a save one of its processes is killed, or all are; whatever loads
then must be one of those checkpoints, no older than the last one that was seen complete.  The next
job goes on from it.  Every sync takes a little longer here, so that kills fall on all moments.
"""
import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from minidist import BadInput, checkpoint, storage, train
from minidist.ranks import environment, launch
from minidist.ranks.comm import solo

STEPS, PAUSE = 30, 0.002
FLAGS = (f"--preset lesson --layers 1 --context 8 --batch 4 --steps {STEPS} --save-every 1 "
         "--zero 1 --no-figure --sample 0 --text words --out").split()


def worker():
    """Train, but slowly where it saves; say which process this is."""
    sync = storage.sync
    storage.sync = lambda path: (sync(path), time.sleep(PAUSE * (20 if path.is_dir() else 1)))
    Path("pids", str(os.getpid())).touch()
    return train.main()


def start(ranks, out, *flags):
    """Start a job in this directory.  -> Popen"""
    shutil.rmtree("pids", ignore_errors=True)
    os.mkdir("pids")
    command = launch.command(ranks, [sys.executable, "-m", "tests.kill_saves", "--worker",
                                     *FLAGS, str(out), *flags])
    root = Path(__file__).parent.parent
    return subprocess.Popen(command, stdout=open("log", "w"), stderr=subprocess.STDOUT,
                            env={**os.environ, **environment.SETTINGS, "PYTHONPATH": str(root)})


def kill(job, rng):
    """Kill one process of a job, or all, and wait until none is left."""
    pids = [int(path.name) for path in Path("pids").iterdir()]
    for pid in pids if rng.random() < 0.5 else rng.sample(pids, 1):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    job.wait(60)
    for pid in pids:
        while alive(pid):
            time.sleep(0.01)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "zombie" not in Path(f"/proc/{pid}/status").read_text().split("Threads")[0]


def last_step(out):
    """The newest step that is visible; 0 for none."""
    return max(map(storage.number, storage.committed(out)), default=0)


def content(found):
    """All that a checkpoint holds, as checksums, and what is counted."""
    tensors = {name: entry["sha256"] for name, entry in found.index["tensors"].items()}
    return tensors, found.index["counters"], found.index["about"]["history"]["losses"]


def moment(out, since):
    """Say at which moment of a save the job has died."""
    if saving(out, since):
        return "while files were written"
    paths, wrong = storage.candidates(out)
    between = wrong or paths and storage.number(paths[0]) < last_step(out)
    return "between the rename and latest" if between else "outside of a save"


def saving(out, since):
    """Has a save begun that is not left over from before?"""
    try:
        return any(path.stat().st_mtime > since for path in out.glob("step_*.part"))
    except FileNotFoundError:                               # renamed in between: it has begun
        return True


def trial(ranks, out, rng):
    """Let a job go on, kill it during a save, and load.  -> moment, Found or None"""
    before, began = last_step(out), time.time()
    job = start(ranks, out, *(["--resume", str(out)] if before else []))
    while job.poll() is None and not saving(out, began):
        time.sleep(0.001)
    time.sleep(rng.random() * 0.8)
    seen = last_step(out)
    kill(job, rng)
    when = moment(out, began)
    try:
        found = checkpoint.find(out, solo())
    except BadInput:
        if storage.committed(out):
            raise
        return when, None
    if found.index["step"] < seen - 1 or found.refused and "latest" not in found.refused[0]:
        raise AssertionError(f"step {found.index['step']} loads, and {seen} was seen; "
                             f"{found.refused}")
    return when, found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-k", "--kills", type=int, default=100)
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args, moments = parser.parse_args(), Counter()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        Path("words").write_text("what is killed while it is written is as it was\n" * 9)
        if start(args.ranks, "whole").wait():
            raise SystemExit(Path("log").read_text())
        right = {storage.number(path): content(checkpoint.find(path, solo()))
                 for path in storage.committed(Path("whole"))}
        out = Path("out")
        for i in range(args.kills):
            when, found = trial(args.ranks, out, rng)
            if found and content(found) != right[found.index["step"]]:
                raise SystemExit(f"kill {i}, {when}: a wrong step {found.index['step']}")
            moments[when] += 1
            if last_step(out) >= STEPS - 2:
                shutil.rmtree(out)
        os.chdir("/")
    print(f"{args.kills} kills, all resumable, none from a wrong state (seed {args.seed}): "
          + "; ".join(f"{count} {when}" for when, count in moments.items()))


if __name__ == "__main__":
    if "--worker" in sys.argv:
        sys.argv.remove("--worker")
        launch.run(worker)
    main()
