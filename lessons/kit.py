'''What all lessons share.  A lesson is read from top to bottom, one function per screen:

    """RING ALLREDUCE      How do p ranks sum a vector so that nobody sends twice its size?

      lifts   bandwidth   the root of a naive sum moves p - 1 times the vector; nobody here does
      costs   latency     2(p-1) messages one after the other, where a tree needs 2 log p
      code    minidist/collectives/ring.py
      run     mpirun -n 4 python -m lessons.ring        or: python -m lessons.ring -n 4
    """
    EXERCISE = [ring.reduce_scatter]            # what --stub writes and --mine replaces

    def once_around(lesson):
        """Once around to add, once around to copy              <- the title of the screen

        Two to four lines that say why. They are printed under the title."""
        lesson.predict("4 ranks: how many hops?", 6, "hops", why="2(p-1)", mistakes={3: "..."})
        lesson.source(ring.cut)                 # the library's code, never a copy of it
        lesson.rows(["holds"], [str(x)])        # one row from each rank, in rank order
        lesson.say("Words that need numbers, or come after them.")

    def prove(lesson):
        """Is it right, and what does it cost?"""
        with lesson.comm.counting() as counted:
            y = ring.all_reduce(...)
        lesson.check("sum", kit.difference(y, ref), bound=1e-12)
        lesson.ledger(("bytes sent per rank", "2(p-1)/p S", predicted, counted.bytes), p=p, S=S)

    @kit.breaks(ring, "reduce_scatter")         # patched in for the time of one prove()
    def off_by_one(chunks, comm, op):
        """One sentence: what is wrong.

        Then why it matters, and where it was seen."""

    TAKEAWAY, FIELD, TRY = "One sentence.", "what real systems call it", ["...", "..."]
    SCREENS = [once_around, prove, off_by_one]  # the table of contents; a bug: "Break it"

    if __name__ == "__main__":
        kit.run(SCREENS)

Rules.  Everything a lesson does goes through `lesson.comm`: a break and a reader's solution are
tried on thread ranks, where it is another communicator. Modules are imported whole. Every method
of `lesson` is called by every rank, with that rank's own values; rank 0 prints. `prove` runs again
under every break and on every reader's functions: it takes a second or two, prints about ten lines,
names every check once and without figures, and fails under every break, on 2 ranks as on 4, under
no two of them with the same checks. A question stands where nothing above it gives the answer away.
A formula in a ledger gives its number with a pencil: the kit works it out from the letters. At most
220 lines of source, 90 printed lines, 24 to a screen. OPTIONS = {"trace": "write a trace"} adds a
flag that names a file, `lesson.options.trace`; ALONE = True: one rank runs it, the others wait;
POINTS = {"reduce_scatter": 2}: what a function of the exercise is worth, if not one point.
'''
import inspect
import io
import os
import sys
import textwrap
import time
from types import SimpleNamespace

from lessons import between, exercises, guess, hints, substitute, tables
from lessons.proving import Proving
from lessons.record import Record
from lessons.script import look_around, parse, read
from lessons.substitute import breaks
from lessons.tables import difference, duration, fold, size
from minidist import files
from minidist.ranks import launch
from minidist.ranks.comm import run_threads, solo, world

__all__ = ["run", "run_on_threads", "breaks", "difference", "duration", "fold", "size", "Lesson"]


def run(screens):
    """Run a lesson as a command, on the ranks it was started on.  Never returns."""
    launch.run(lambda: _command(read(screens), sys.argv[1:]))


def run_on_threads(screens, ranks, argv=(), out=None):
    """Run a lesson on thread ranks of this process.  -> its JSON dict, text as "output"

    out: where it prints; a Record also remembers how each line came about"""
    script, out = read(screens), out or io.StringIO()
    options = parse(script, argv)
    with substitute.patched(*exercises.replacements(script, options.mine)):
        results = run_threads(ranks, _session, script, options, out)
    return dict(results[0], output=out.getvalue())


def _command(script, argv):
    options = parse(script, argv)
    options.processes = True                               # which may sleep; threads wait exactly
    with substitute.patched(*exercises.replacements(script, options.mine)):
        ok = _session(world(), script, options, sys.stdout)["ok"]
        return 0 if ok and not options.lost else 1


def _session(comm, script, options, out, ranks=None):
    """One run on this rank, as the options ask for.  -> JSON dict, the same on every rank"""
    lesson, start = Lesson(comm, script, options, out), time.perf_counter()
    look_around(lesson)
    if script.alone and comm.size > 1:
        return lesson.share(lambda: _session(solo(), script, options, out, comm.size))
    if options.stub:
        exercises.write_stub(lesson)
    elif options.hint is not None:
        hints.show(lesson, options.hint)
    elif options.mine:
        exercises.grade(lesson)
    elif options.break_:
        substitute.show(lesson, options.break_)
    elif options.prove:
        script.prove(lesson)
    else:
        lesson.print_lines(*script.header, kind="header")
        for screen in script.screens:
            lesson.screen(screen)
        lesson.close(time.perf_counter() - start)
    result = lesson.result(time.perf_counter() - start, ranks or comm.size)
    lesson.write(options.json, files.numbers(result))
    lesson.comm.barrier()                                  # nobody leaves before it is written
    return result


class Lesson(Proving):
    """What a lesson talks to: prints from rank 0, compares on all ranks, remembers what failed."""

    def __init__(self, comm, script, options, out):
        self.script, self.options, self.out = script, options, out
        self.comm = comm.split(0, name="world")
        self.side = comm.split(0, name="kit")              # its messages are not the lesson's
        self.checks, self.counts, self.broken, self.guesses = [], [], [], []
        self.shown, self.pictures, self.letters = 0, "", ""
        self.terse = self.hasty = False                    # print, or meet, only what is wrong

    # ---- showing

    def screen(self, function):
        """Show one screen: its docstring is title and first words; or a planted bug, caught."""
        self.shown += 1
        bug = hasattr(function, "replaces")
        title, _, words = (inspect.getdoc(function) or "").partition("\n\n")
        self.heading(f"{self.shown}  {'Break it' if bug else title}", function)
        if bug:
            return self.break_it(function)
        if words:
            self.say(words)
        function(self)

    def heading(self, title, screen=None):
        self.print_lines("", f"-- {title} ".ljust(tables.WIDTH, "-"), kind="heading", title=title,
                         screen=screen)

    def say(self, text="", /, **what):
        """Print a paragraph, its own indentation replaced by the page's."""
        lines = textwrap.indent(textwrap.dedent(text).strip("\n"), "  ").split("\n")
        self.print_lines(*lines, **what)

    def fill(self, text, indent="", **what):
        """Print a paragraph that holds numbers, its lines broken anew."""
        text = " ".join(text.split())
        self.say(textwrap.fill(text, tables.WIDTH - 2, subsequent_indent=indent),
                 **what or dict(kind="paragraph", text=text))

    def source(self, function, first=None, last=None):
        """Quote a library function, from the line holding `first` to the line holding `last`."""
        lines = tables.code(function, first, last)
        self.print_lines(*("      " + line for line in lines), kind="code", function=function,
                         code=lines)

    def table(self, header, rows):
        """Print rows under a header; cells are text or numbers."""
        self.print_lines(*("  " + line for line in tables.table(header, rows)), kind="table",
                         header=header, rows=rows)

    def rows(self, header, cells):
        """Print one row of cells from every rank, in rank order."""
        everyone = self.collect([tables.cell(value) for value in cells])
        self.table(["rank", *header], [[str(r), *row] for r, row in enumerate(everyone)])

    def figure(self, draw, *data, name=None):
        """Save the picture that draw(figure, *data) makes on an empty matplotlib figure."""
        path = os.path.join(self.options.out, (name or self.script.name) + ".png")
        if not self.options.no_figure and self.write(path, files.picture(draw, *data)):
            self.pictures += f"   picture: {path}"
            self.print_lines(kind="picture", path=path)    # named at the end

    def write(self, path, fill):
        """Write a file on rank 0; what cannot be written ends no lesson, but its status is 1."""
        written = self.comm.rank > 0 or files.attempt(path, fill)
        self.options.lost = self.options.lost or not written
        return written

    # ---- guessing

    def predict(self, question, answer, unit="", why="", mistakes=None):
        """Let the reader commit a number before it is shown (--predict), then explain the gap.

        mistakes: {wrong number: what was overlooked}.  Without --predict: question and answer."""
        number = None
        if self.options.predict is not None:
            number = self.share(lambda: guess.ask(self, question, unit))
        right = f"{tables.cell(answer)} {unit}".strip()
        if number is None:
            return self.fill(f"{question}  {right}" + (f": {why}" if why else ""), "   ",
                             kind="question", question=question, answer=right, why=why)
        good = guess.near(number, answer)
        close = [note for value, note in (mistakes or {}).items() if guess.near(number, value)]
        note = "right" if good else (close or [why])[0]
        self.guesses.append(dict(question=question, unit=unit, guess=number, answer=answer,
                                 ok=good))
        self.fill(f"you guessed {tables.cell(number)} {unit}, it is {right}: {note}", "   ")

    # ---- proving: lessons/proving.py

    def break_it(self, bug):
        """Run prove() with a planted bug in place and demand that one of its checks notices."""
        substitute.demonstrate(self, bug)
        others = [b.title for b in self.script.breaks if b is not bug] + ["mystery"]
        self.say("others: --break " + " | ".join(others))

    # ---- between ranks

    def collect(self, value):
        """Gather one small value (numbers, text, lists) of every rank, for every rank.  -> list"""
        return between.collect(self.side, value)

    def share(self, make):
        """Let rank 0 compute a small value while the others sleep: its core is needed."""
        return between.share(self.side, make, self.options.processes)

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
        return files.finite(dict(
            lesson=self.script.name, ranks=ranks, seconds=round(seconds, 3), checks=self.checks,
            ledger=self.counts, breaks=self.broken, guesses=self.guesses,
            ok=all(record["ok"] for record in records)))

    def close(self, seconds):
        """Takeaway, the names used elsewhere, exercises; how long it took, and what failed."""
        takeaway, field, tries = self.script.close
        self.heading("Takeaway")
        lines = [takeaway] + ([f"In the field: {field}"] if field else [])
        lines += [f"Try ({chr(97 + i)}) {text}" for i, text in enumerate(tries)]
        if self.script.exercise:
            names = ", ".join(function.__name__ for function in self.script.exercise)
            lines.append(f"Write {names}: --stub mine.py, then --mine mine.py")
        for line in filter(None, lines):
            self.fill(line, "   ")
        ranks = "1 rank" if self.comm.size == 1 else f"{self.comm.size} ranks"
        failed = [r.get("name") or r["quantity"]
                  for r in self.checks + self.counts + self.broken if not r["ok"]]
        self.say(f"{seconds:.1f} s, {ranks}{self.pictures}"
                 + (f"   FAILED: {', '.join(failed)}" if failed else ""), kind="end",
                 took=f"{seconds:.1f} s", ranks=ranks)

    def print_lines(self, *lines, **what):
        """Print on rank 0.  what: how the lines came about, for who keeps a record"""
        if self.comm.rank == 0:
            for line in lines:
                print(line, file=self.out)
            if isinstance(self.out, Record):
                self.out.remember(lines, **what)
