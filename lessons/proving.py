"""How a proof compares: checks, counts against formulas, verdicts on training, and questions.

    lesson.check(name, error, bound)              a difference that must be small on every rank
    lesson.ledger((quantity, formula, ...), ...)  what was counted must be what the formula says
    lesson.verdict(verify.train(...))             the same training as one process
    with lesson.asking() as ask: ...              the functions of the exercise, one by one

What is wrong leaves a message in its record: what was expected, what was found, on which rank.
"""
import numpy as np

from lessons import formula, tables
from lessons.answers import Asking


class Enough(Exception):
    """Something is wrong, and a hasty lesson need not know what else is."""


class Proving:
    """The half of a Lesson that compares on all ranks, prints what it found and remembers it."""

    def check(self, name, error, bound=0.0, note=""):
        """Demand error <= bound on every rank (bound 0: equal).  -> bool, the same everywhere

        name: without figures that a run measures; note: those figures."""
        errors = [np.inf if e is None or e != e else e for e in self.collect(float(error))]
        worst = max(errors)
        ok, rank = worst <= bound, self._on(errors.index(worst))
        if not (self.terse and ok):
            text = name + (f": {note}" if note else "")
            mark = self._mark(ok, rank)
            found = f"{tables.relative(worst):>7} (bound {tables.relative(bound)})  "
            self.say(f"{text:56}  {found}{mark}", kind="check", text=text, found=found, mark=mark)
        self._record(self.checks, f"difference {tables.relative(worst)} "
                     f"(bound {tables.relative(bound)}){rank}",
                     name=name, error=worst, bound=bound, ok=ok)
        return ok

    def ledger(self, *rows, **letters):
        """Print (quantity, formula, predicted, counted); on every rank all three must agree.

        letters: what the formulas' letters stand for on this rank; a quantity such as "P  bytes of
        parameters" names one for the rows below it.  predicted: None where only the formula says"""
        own = []
        for quantity, text, predicted, counted in rows:
            worked_out = formula.value(text, letters)
            predicted = worked_out if predicted is None else np.asarray(predicted).item()
            letters[quantity.partition("  ")[0]] = predicted
            own.append([_whole(x) for x in (predicted, np.asarray(counted).item(), worked_out)])
        self._show([(quantity, text, *_first_wrong(numbers)) for (quantity, text, *_), *numbers
                    in zip(rows, *self.collect(own))])
        self._letters(" ".join(row[1] for row in rows),
                      [row[0].partition("  ")[0] for row in rows], letters)

    def _show(self, rows):
        """Print and record a ledger's rows.  [(quantity, formula, predicted, counted, ok, rank)]"""
        shown = [[*row, self._mark(ok, self._on(rank))] for *row, ok, rank in rows
                 if not (self.terse and ok)]
        if shown:
            header = ["quantity", "formula", "predicted", "counted", ""]
            if max(map(len, tables.table(header, shown))) > tables.WIDTH - 2:
                header, *shown = [row[:1] + row[2:] for row in [header, *shown]]
            self.table(header, shown)
        for quantity, text, predicted, counted, ok, rank in rows:
            self._record(self.counts, f"predicted {predicted}, counted {counted}{self._on(rank)}",
                         quantity=quantity, formula=text, predicted=predicted, measured=counted,
                         ok=ok)

    def _letters(self, formulas, defined, letters):
        """The line under a ledger that says what its letters stand for."""
        given = {name: value for name, value in letters.items() if name not in defined}
        names = formula.used(formulas, given)
        text = ", ".join(f"{name} = {tables.cell(letters[name])}" for name in names)
        if text not in (self.letters, "") and not self.terse:          # once is enough
            self.say("   where " + text)
            self.letters = text

    def verdict(self, verdict, name="the same training"):
        """Print verify's comparison with one-process training and count it as a check.  -> bool"""
        if not isinstance(verdict, dict):                  # from another rank: as data
            verdict = dict(vars(verdict), text=verdict.line())
        self.say(verdict["text"])
        self._record(self.checks, self.share(lambda: verdict["text"]), name=name,
                     error=float(verdict["worst"]), bound=verdict["bound"],
                     ok=bool(verdict["equal"]))
        return bool(verdict["equal"])

    def asking(self):
        """`with` this, the functions of the exercise are asked one by one; one check for each."""
        return Asking(self)

    def answered(self, gaps):
        """Record and print what asking() found.  gaps: {function: how its first wrong answer is
        wrong, or ""} """
        everyone = self.collect(list(gaps.values()))
        for i, name in enumerate(gaps):
            rank = next((r for r, found in enumerate(everyone) if found[i]), None)
            message = "" if rank is None else everyone[rank][i] + self._on(rank)
            if message:
                self.fill(f"{name}, {message}  WRONG", "   ")
            self._record(self.checks, message, name=f"{name}, asked alone",
                         error=float(rank is not None), bound=0.0, ok=rank is None)
        if not (self.terse or any(map(any, everyone))):
            text = f"asked one by one: {', '.join(gaps)}"
            self.say(f"{text:56}        0 (bound 0)  ok", kind="check", text=text,
                     found="0 (bound 0)  ", mark="ok")

    def _record(self, records, message, **record):
        """Remember one result, and why it is wrong where it is."""
        records.append(record if record["ok"] else dict(record, message=message))
        if self.hasty and not record["ok"] and self.comm.rank == 0:     # which the others follow
            raise Enough

    def _on(self, rank):
        return f" on rank {rank}" if self.comm.size > 1 else ""

    def _mark(self, ok, where):
        return "ok" if ok else "WRONG" + where


def _first_wrong(everyone):
    """Of what each rank predicted, counted and worked out by formula, choose a rank where these
    disagree, or rank 0.  -> predicted, counted, ok, rank"""
    rank = next((r for r, numbers in enumerate(everyone) if len(set(numbers)) > 1), 0)
    predicted, counted, worked_out = everyone[rank]
    ok = predicted == counted == worked_out
    return predicted if predicted != counted else worked_out, counted, ok, rank


def _whole(number):
    """A float that is a whole number up to rounding, as that number."""
    return round(number) if abs(number - round(number)) < 1e-6 * max(1, abs(number)) else number
