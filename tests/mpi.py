"""Run a test on N MPI ranks from an ordinary pytest process.

    @mpi(4)                                        @pytest.mark.parametrize("n", [0, 7])
    def test_shift(comm, n): ...                   fine together: parameters go by keyword

pytest only launches `mpiexec -n 4 python -m tests.mpi ...`; each rank imports the test's module,
calls the function with comm = comm.world(), and leaves a result file. Passed means: status 0 *and*
every rank said "ok". A launch takes half a second: a test of several group sizes splits its comm.

The MPI is the one of the Python that runs pytest: run the suite again with another environment's
Python for another MPI.
"""
import faulthandler
import functools
import importlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest

from minidist.ranks import environment, launch, safety
from tests import unwritten

ROOT = Path(__file__).resolve().parent.parent
HANG = 600                  # seconds after which a job hangs, however busy the machine is


def mpi(ranks, timeout=HANG, **env):
    """Make a test of `fn(comm, ...)` that passes when it passes on every one of `ranks` ranks."""
    def decorate(fn):
        @functools.wraps(fn)
        def test(**kwargs):
            on_ranks(fn, ranks, timeout, kwargs, env)
        test.body = fn
        del test.__wrapped__                                   # pytest shall not ask for `comm`
        test.__signature__ = inspect.Signature(list(inspect.signature(fn).parameters.values())[1:])
        return test
    return decorate


def on_ranks(fn, ranks, timeout=HANG, kwargs=None, env=None):
    """Launch fn(comm, **kwargs) on MPI ranks; fail with everything they had to say."""
    need_mpi()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "kwargs").write_bytes(pickle.dumps(kwargs or {}))
        command = [sys.executable, "-m", "tests.mpi", fn.__module__, fn.__name__, str(folder),
                   str(timeout)]
        env = {"MINIDIST_TIMEOUT": str(0.7 * timeout), **(env or {})}
        status, output = execute(launch.command(ranks, command), timeout + 10, env)
        results = [read(folder / f"rank{r}") for r in range(ranks)]
        if status == 0 and all(r == "ok" for r in results):
            return
        if all(r and r.startswith("skipped") for r in results):
            pytest.skip(results[0])
        stacks = [read(folder / f"stack{r}") for r in range(ranks)]
    pytest.fail(story(fn.__name__, status, results, stacks, output), pytrace=False)


def story(name, status, results, stacks, output):
    """The message of a failed test: each rank's result and stack, then what all printed."""
    lines = [f"{name} on {len(results)} ranks: "
             + ("hung" if status is None else f"exit status {status}")]
    for rank, (result, stack) in enumerate(zip(results, stacks)):
        lines += [f"--- rank {rank}: {result or 'no result (killed, hung, or left early)'}"]
        lines += [stack] if stack else []
    return "\n".join([*lines, "--- output of all ranks ---", output])


def need_mpi():
    """Skip the test, and say so, where MPI is missing."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    if environment.mpiexec() is None:
        pytest.skip("no mpiexec beside this Python or on PATH")


def execute(command, timeout=HANG, env=None, interrupt=None, alone=None):
    """Run a command to its end -> (exit status, or None if it hung; output).  Leaves no process

    interrupt: send Ctrl-C to the whole job as soon as its output contains this text; alone: send
    this signal instead, to the command's own process and no other.
    """
    mark = f"MINIDIST_TEST={os.getpid()}.{time.monotonic_ns()}"
    env = {**os.environ, **environment.SETTINGS, "PYTHONUNBUFFERED": "1", **(env or {}),
           "MINIDIST_TEST": mark.partition("=")[2]}
    with tempfile.NamedTemporaryFile() as file, open(file.name, "a+b") as out:
        job = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out,
                               stderr=subprocess.STDOUT, start_new_session=True)
        try:
            if interrupt:
                wait_for_text(out, interrupt, job, timeout)
                os.kill(job.pid, alone) if alone else os.killpg(job.pid, signal.SIGINT)
            status = job.wait(timeout)
            assert not survivors(mark), f"processes are left behind: {survivors(mark)}"
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(job)
        out.seek(0)
        return status, out.read().decode(errors="replace")


def survivors(mark):
    """The processes of a job that has ended, found by a mark in their environment (Linux)."""
    deadline = time.monotonic() + 60
    while (found := list(marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def marked(mark):
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                yield int(folder.name)
        except OSError:
            pass


def wait_for_text(out, text, job, timeout):
    """Poll the output file until text is there or the job has ended."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and job.poll() is None:
        if text.encode() in os.pread(out.fileno(), 1 << 20, 0):
            return
        time.sleep(0.02)


def end(job):
    """End a job that still runs: politely, so that mpiexec takes its ranks along, then by force."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(5)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(job.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    job.wait()


def read(path):
    return path.read_text().strip() if path.exists() else ""


def main(module, name, folder, timeout):
    """One rank: run the test and write down how it went."""
    unwritten.fill_what_is_empty()
    folder, rank = Path(folder), environment.rank()
    with open(folder / f"stack{rank}", "w") as stack:
        faulthandler.dump_traceback_later(float(timeout), exit=True, file=stack)
        result = outcome(module, name, pickle.loads((folder / "kwargs").read_bytes()))
        (folder / "writing").with_suffix(f".{rank}").write_text(result)
        os.replace(folder / f"writing.{rank}", folder / f"rank{rank}")
        faulthandler.cancel_dump_traceback_later()
    safety.leaving(0)                             # a SystemExit that the test caught is no ending
    if result != "ok" and not result.startswith("skipped"):
        time.sleep(0.3)                           # ranks that fail together all get to say so
        sys.stderr.flush()
        from mpi4py import MPI
        MPI.COMM_WORLD.Abort(1)


def outcome(module, name, kwargs):
    """Call the test; return "ok", "skipped: why" or the traceback."""
    try:
        from minidist.ranks import comm
        fn = getattr(importlib.import_module(module), name)
        getattr(fn, "body", fn)(comm.world(), **kwargs)
        return "ok"
    except pytest.skip.Exception as skip:
        return f"skipped: {skip}"
    except BaseException:
        return traceback.format_exc()


if __name__ == "__main__":
    main(*sys.argv[1:])
