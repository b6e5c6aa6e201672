"""Ask the reader for a number before it is shown, and understand it as people write numbers.

    number("1,000 MB", "GB")  -> 1.0          number("twice", "times")  -> 2.0

Rank 0 asks. Under mpirun it types on the launcher's terminal, where that hands its input on.
"""
import os
import re
import sys

from minidist import BadInput

WORDS = dict({word: n for n, word in enumerate(
    "zero one two three four five six seven eight nine ten eleven twelve".split())},
    none=0, nothing=0, half=1 / 2, quarter=1 / 4, third=1 / 3, once=1, twice=2, double=2)
FAMILIES = [{"byte": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12},
            {"us": 1e-6, "ms": 1e-3, "s": 1, "second": 1},
            {"": 1, "k": 1e3, "thousand": 1e3, "million": 1e6, "billion": 1e9}]
NUMBER = re.compile(r"([-+]?(?:\d+(?:,\d{3})+|\d+)?(?:\.\d+)?(?:e[-+]?\d+)?)(?:\s*/\s*(\d+))?"
                    r"\s*([a-z%]*)")


def number(text, unit=""):
    """Read a number as people write it, in the unit asked for.  -> float, None if it is none"""
    text = re.sub(r"^(about|a|an|~)\s*", "", text.strip().lower())
    for word, n in WORDS.items():
        text = re.sub(rf"^{word}\b", repr(float(n)), text)
    found = NUMBER.match(text)
    if not found or not re.search(r"\d", found[1]):
        return None
    given = float(found[1].replace(",", "")) / float(found[2] or 1)
    return given * scale(found[3], unit)


def scale(given, wanted):
    """How many of the unit asked for one of the unit given is; 1 where they are no relatives."""
    given, wanted = (word.split(" ")[0].lower() for word in (given, wanted))
    for family in FAMILIES:
        known = {**family, **{name + "s": n for name, n in family.items() if len(name) > 2}}
        if given in known and wanted in known:
            return known[given] / known[wanted]
    return FAMILIES[-1].get(given, 1)


def listed(text):
    """The numbers of --predict 6,2,1.5 or --predict "1,000 MB; 6".  Raises BadInput"""
    answers = re.split(";" if ";" in text else ",", text)
    if any(number(answer) is None for answer in answers):
        raise BadInput(f"--predict takes numbers such as 6,2,1.5 or \"1,000 MB; 6\", not {text!r}")
    return [answer.strip() for answer in answers]


def ask(lesson, question, unit):
    """Get the reader's number, or None where none is given.  Rank 0 only"""
    given = lesson.options.predict
    if isinstance(given, list):
        return number(given.pop(0), unit) if given else None
    for again in ("", "(a number, please, such as 6 or 1.5 MB)  "):
        line = typed(lesson, f"{again}{question}  [{unit or 'a number'}] ")
        if not line or number(line, unit) is not None:
            return number(line, unit)
    return None


def typed(lesson, question):
    """One line from the reader's terminal.  Rank 0 only"""
    print("  " + question, end="", file=lesson.out, flush=True)
    return sys.stdin.readline().strip()


def near(guess, value):
    return abs(guess - value) <= 0.02 * abs(value)


# ---- is there a terminal?

def terminal():
    """Whether somebody can type: here, or where the launcher of this job reads its input."""
    if sys.stdin.isatty() or os.environ.get("MINIDIST_TERMINAL") == "1":
        return True
    return os.path.exists("/proc/self/stat") and handed_on()


def handed_on():
    """Whether mpirun, some levels above, reads a terminal and runs in its foreground (Linux)."""
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
            parent, group, _, _, foreground = map(int, rest.split()[1:6])
            if re.match(r"mpi(run|exec)|prte|orte|hydra", name):
                source = os.readlink(f"/proc/{pid}/fd/0")
                if source.startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
                    return group == foreground
        except OSError:
            return False
        pid = parent
    return False
