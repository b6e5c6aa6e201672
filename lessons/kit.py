'''What all lessons share.  A lesson is a flat script, read from top to bottom, like this one:

    """RING ALLREDUCE      Can p ranks sum a vector without anyone moving more than twice its size?

      lifts   bandwidth   the root of a naive sum moves p - 1 times the vector; nobody here does
      costs   latency     2(p-1) messages one after the other, where a tree needs 2 log p
      code    minidist/collectives/ring.py
      before  lessons.collectives  (the six primitives)          next  lessons.dp
      run     mpirun -n 4 python -m lessons.ring        or: python -m lessons.ring -n 4
    """
    from lessons import kit
    from minidist import cost
    from minidist.collectives import ring

    EXERCISE = [ring.reduce_scatter]            # what --stub writes and --mine replaces

    def main(lesson):                           # the docstring above is printed as the header
        comm = lesson.comm
        lesson.part("Around the ring once")     # starts a numbered screen of at most 24 lines
        lesson.say("""
            Two to four lines that say why. Printed by rank 0 only, like all but `rows`.""")
        lesson.source(ring.reduce_scatter)      # the library's code, never a copy of it
        lesson.rows(["holds"], [str(x)])        # one row from each rank, in rank order
        lesson.part("Is it right, and what does it cost?")
        prove(lesson)
        lesson.part("Break it")
        lesson.break_it(off_by_one)             # one bug from the field; --break shows the others
        lesson.takeaway("One sentence.", field="what real systems call it", tries=["...", "..."])

    def prove(lesson):
        """Check values and counts.  Runs again under every break and on every reader's solution."""
        with lesson.comm.counting() as counted:
            y = ring.all_reduce(...)
        lesson.check("sum", kit.difference(y, ref), bound=1e-12)
        lesson.ledger(("bytes sent per rank", "2(p-1)/p S", predicted, counted.bytes))

    @kit.breaks(ring, "reduce_scatter")         # patched in for the time of one prove()
    def off_by_one(chunks, comm, op):
        """One sentence: what is wrong.

        Then why it matters, and where it was seen."""

    if __name__ == "__main__":
        kit.run(main)

Rules.  Everything a lesson does goes through `lesson.comm`, never through `comm.world()`: a break
and a reader's solution are tried on thread ranks, where `lesson.comm` is another communicator.
Modules are imported whole (`from minidist import ring`; `ring.all_reduce(...)`).  Every method of
`lesson` is called by every rank, with that rank's own values; rank 0 prints.  `prove` takes at
most a second or two, prints at most about ten lines, and must fail under every break, on 2 ranks
as on 4.  A lesson prints at most about 90 lines of 100 columns.  Optional: OPTIONS = {"trace":
"write a Chrome trace to this file"} adds a flag `--trace VALUE`, read as `lesson.options.trace`;
ALONE = True is for a lesson that needs one rank: with more, rank 0 runs it and the others wait.
'''
import io
import json
import os
import sys
import textwrap
import time
from types import SimpleNamespace

import numpy as np

from lessons import exercises, substitute, tables
from lessons.script import ask, parse, read, terminal
from lessons.substitute import breaks
from lessons.tables import duration, fold, size
from minidist import flags
from minidist.ranks import launch
from minidist.ranks.comm import run_threads, solo, world

__all__ = ["run", "run_on_threads", "breaks", "difference", "duration", "fold", "size", "Lesson"]


def run(main):
    """Run a lesson as a command, on the ranks it was started on.  Never returns."""
    launch.run(lambda: _command(read(main), sys.argv[1:]))


def run_on_threads(main, ranks, argv=()):
    """Run a lesson on thread ranks of this process.  -> its JSON dict, text as "output" """
    script, out = read(main), io.StringIO()
    options = parse(script, argv)
    with substitute.patched(*exercises.replacements(script, options.mine)):
        results = run_threads(ranks, _session, script, options, out)
    return dict(results[0], output=out.getvalue())


def _command(script, argv):
    options = parse(script, argv)
    options.processes = True                               # which may sleep; threads wait exactly
    with substitute.patched(*exercises.replacements(script, options.mine)):
        return 0 if _session(world(), script, options, sys.stdout)["ok"] else 1


def _session(comm, script, options, out, ranks=None):
    """One run on this rank, as the options ask for.  -> JSON dict, the same on every rank"""
    lesson, start = Lesson(comm, script, options, out), time.perf_counter()
    if script.alone and comm.size > 1:
        return lesson.share(lambda: _session(solo(), script, options, out, comm.size))
    if options.stub:
        exercises.write_stub(lesson)
    elif options.mine:
        exercises.grade(lesson)
    elif options.break_:
        substitute.show(lesson, options.break_)
    elif options.prove:
        script.prove(lesson)
    else:
        lesson.print_lines("", *script.header)
        script.main(lesson)
        lesson.print_end(time.perf_counter() - start)
    result = lesson.result(time.perf_counter() - start, ranks or comm.size)
    if options.json and comm.rank == 0:
        flags.write(options.json, lambda file: file.write(json.dumps(result, indent=1).encode()))
    lesson.comm.barrier()                                  # nobody leaves before it is written
    return result


def difference(x, reference):
    """Relative difference, max|x - reference| / max|reference|; inf if shapes differ."""
    x, reference = np.asarray(x), np.asarray(reference)
    if x.shape != reference.shape:
        return float("inf")
    if not x.size:
        return 0.0
    scale = float(np.max(np.abs(reference))) or 1.0
    return float(np.max(np.abs(x - reference))) / scale


class Lesson:
    """What a lesson talks to: prints from rank 0, compares on all ranks, remembers what failed."""

    def __init__(self, comm, script, options, out):
        self.script, self.options, self.out = script, options, out
        self.comm = comm.split(0, name="world")
        self.side = comm.split(0, name="kit")              # its messages are not the lesson's
        self.checks, self.counts, self.broken = [], [], []
        self.parts, self.last, self.terse = 0, "", False    # terse: print only what is wrong
        self.can_ask = terminal()

    # ---- showing

    def part(self, title):
        """Start a numbered screen."""
        self.parts += 1
        self.gap()
        self.print_lines(f"-- {self.parts}  {title} ".ljust(tables.WIDTH, "-"), "")

    def say(self, text=""):
        """Print a paragraph, its own indentation replaced by the page's."""
        self.print_lines(*textwrap.indent(textwrap.dedent(text).strip("\n"), "  ").split("\n"))

    def source(self, function, first=None, last=None):
        """Quote a library function, from the line holding `first` to the line holding `last`."""
        self.gap()
        self.print_lines(*("      " + line for line in tables.code(function, first, last)))
        self.gap()

    def table(self, header, rows):
        """Print rows under a header; cells are text or numbers."""
        self.print_lines(*("  " + line for line in tables.table(header, rows)))

    def rows(self, header, cells):
        """Print one row of cells from every rank, in rank order."""
        everyone = self.collect([tables.cell(value) for value in cells])
        self.table(["rank", *header], [[str(r), *row] for r, row in enumerate(everyone)])

    def figure(self, draw, *data, name=None):
        """Save the picture that draw(figure, *data) makes on an empty matplotlib figure."""
        if self.comm.rank or self.options.no_figure:
            return
        from matplotlib.figure import Figure               # no pyplot: no window, no global state
        picture = Figure(figsize=(9, 5), layout="constrained")
        draw(picture, *data)
        path = os.path.join(self.options.out, (name or self.script.name) + ".png")
        flags.write(path, lambda file: picture.savefig(file, dpi=110, format="png"))
        self.say(f"picture: {path}")

    # ---- guessing

    def predict(self, question, answer, unit="", why="", mistakes=None):
        """Let the reader commit a number before it is shown (--predict), then explain the gap.

        mistakes: {wrong number: what was overlooked}.  Without --predict: question and answer."""
        guess = None
        if self.options.predict is not None:
            guess = self.share(lambda: ask(self, f"{question}  [{unit or 'a number'}] "))
        right = f"{tables.cell(answer)} {unit}".strip()
        if guess is None:
            return self._wrapped(f"{question}  {right}" + (f": {why}" if why else ""))
        close = {value: note for value, note in (mistakes or {}).items() if _near(guess, value)}
        note = "right" if _near(guess, answer) else next(iter(close.values()), why)
        self._wrapped(f"you guessed {tables.cell(guess)} {unit}, it is {right}   {note}")

    # ---- proving

    def check(self, name, error, bound=0.0):
        """Demand error <= bound on every rank (bound 0: equal).  -> bool, the same everywhere"""
        errors = [np.inf if e is None or e != e else e for e in self.collect(float(error))]
        worst = max(errors)
        self.checks.append(dict(name=name, error=worst, bound=bound, ok=worst <= bound))
        if not (self.terse and worst <= bound):
            self.say(f"{name:56}  {tables.relative(worst):>7} (bound {tables.relative(bound)})  "
                     + self._mark(worst <= bound, errors.index(worst)))
        return worst <= bound

    def ledger(self, *rows):
        """Print (quantity, formula, predicted, counted); on every rank the two must be equal."""
        everyone = self.collect([[np.asarray(p).item(), np.asarray(c).item()]
                                 for _, _, p, c in rows])
        shown = []
        for i, (quantity, formula, _, _) in enumerate(rows):
            pairs = [numbers[i] for numbers in everyone]
            rank = next((r for r, (p, c) in enumerate(pairs) if p != c), 0)
            predicted, counted = pairs[rank]
            ok = predicted == counted
            self.counts.append(dict(quantity=quantity, formula=formula, predicted=predicted,
                                    measured=counted, ok=ok))
            if not (self.terse and ok):
                shown.append([quantity, formula, predicted, counted, self._mark(ok, rank)])
        if shown:
            self.table(["quantity", "formula", "predicted", "counted", ""], shown)

    def verdict(self, verdict):
        """Print verify's comparison with one-process training and count it as a check.  -> bool"""
        self.say(verdict.line())
        self.checks.append(dict(name="the same training", error=float(verdict.worst),
                                bound=verdict.bound, ok=bool(verdict.equal)))
        return self.checks[-1]["ok"]

    def break_it(self, bug):
        """Run prove() with a planted bug in place and demand that one of its checks notices."""
        substitute.demonstrate(self, bug)
        others = [b.title for b in self.script.breaks if b is not bug] + ["mystery"]
        self.gap()
        self.say("others: --break " + " | ".join(others))

    def takeaway(self, sentence, field="", tries=()):
        """Close the lesson: one sentence, the names used elsewhere, exercises."""
        self.gap()
        self.print_lines("-- Takeaway ".ljust(tables.WIDTH, "-"), "")
        lines = [sentence] + ([f"In the field: {field}"] if field else [])
        lines += [f"Try ({chr(97 + i)}) {text}" for i, text in enumerate(tries)]
        for line in lines:
            self._wrapped(line)

    # ---- between ranks

    def collect(self, value):
        """Gather one small value (numbers, text, lists) of every rank, for every rank.  -> list"""
        if self.side.rank:
            _send_text(self.side, [value], 0)
            return _recv_text(self.side, 0)
        values = [value] + [_recv_text(self.side, r)[0] for r in range(1, self.side.size)]
        for r in range(1, self.side.size):
            _send_text(self.side, values, r)
        return values

    def share(self, make):
        """Let rank 0 compute a small value while the others sleep: its core is needed."""
        if self.side.rank:
            return _recv_text(self.side, 0, asleep=self.options.processes)
        value = make()
        for r in range(1, self.side.size):
            _send_text(self.side, value, r)
        return value

    def quietly(self, comm, out=None):
        """A lesson like this one on another communicator, without pictures or questions."""
        options = SimpleNamespace(**dict(vars(self.options), no_figure=True, predict=None,
                                         processes=False))
        quiet = Lesson(comm, self.script, options, out or io.StringIO())
        quiet.terse = True
        return quiet

    # ---- ending

    def result(self, seconds, ranks):
        """All that was checked, as data.  JSON knows no infinity: such an error is None"""
        records = self.checks + self.counts + self.broken
        checks = [dict(c, error=c["error"] if c["error"] != np.inf else None) for c in self.checks]
        return dict(lesson=self.script.name, ranks=ranks, seconds=round(seconds, 3),
                    checks=checks, ledger=self.counts, breaks=self.broken,
                    ok=all(record["ok"] for record in records))

    def print_end(self, seconds):
        """The last line: how long, on how many ranks, and what failed."""
        ranks = "1 rank" if self.comm.size == 1 else f"{self.comm.size} ranks"
        failed = [r.get("name") or r["quantity"]
                  for r in self.checks + self.counts + self.broken if not r["ok"]]
        self.say(f"{seconds:.1f} s, {ranks}"
                 + (f"   FAILED: {', '.join(failed)}" if failed else ""))

    def _wrapped(self, text):
        self.say(textwrap.fill(text, tables.WIDTH - 2, subsequent_indent="   "))

    def _mark(self, ok, rank):
        return "ok" if ok else "WRONG" + (f" on rank {rank}" if self.comm.size > 1 else "")

    def print_lines(self, *lines):
        if self.comm.rank == 0:
            for line in lines:
                print(line, file=self.out)
            self.last = lines[-1] if lines else self.last

    def gap(self):
        """One empty line, unless there is one already."""
        if self.last.strip():
            self.print_lines("")


def _near(guess, value):
    return abs(guess - value) <= 0.02 * abs(value)


def _send_text(comm, value, to):
    text = np.frombuffer(json.dumps(value).encode(), np.uint8).copy()
    comm.send(np.array([text.size]), to)
    comm.send(text, to)


def _recv_text(comm, source, asleep=False):
    length = np.empty(1, np.int64)
    coming = comm.irecv(length, source)
    while asleep and not coming.ready():
        time.sleep(0.005)
    coming.wait()
    return json.loads(comm.recv(np.empty(length[0], np.uint8), source).tobytes())
