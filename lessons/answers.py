"""Questions to the functions that a reader writes, and how an answer differs from the right one.

    with lesson.asking() as ask:
        ask("broadcast", "5 int32 numbers from root 1")
        tree.broadcast(x, comm, 1)
        ask.right("x", x, np.arange(5, dtype=np.int32))

Every rank asks the same questions in the same order, and goes on after a wrong answer, since the
others do. Reported is each function's first wrong answer, or what it was asked when it failed.
"""
import numpy as np


class Asking:
    """What each function was asked, and the first of its answers that was wrong."""

    def __init__(self, lesson):
        self.lesson, self.name, self.asked, self.gaps = lesson, "", "", {}

    def __enter__(self):
        return self

    def __call__(self, name, asked):
        """Say which function is asked what, before it is called."""
        self.name, self.asked = name, asked
        self.gaps.setdefault(name, "")

    def right(self, what, found, expected, bound=0.0):
        """Demand that an answer has type, dtype, shape and value of the expected one.

        bound: largest error, relative to the largest number expected."""
        gap = difference(found, expected, bound)
        if gap and not self.gaps[self.name]:
            self.gaps[self.name] = f"asked for {self.asked}: {what}: {gap}"

    def __exit__(self, kind, error, trace):
        if error is None:
            self.lesson.answered(self.gaps)
        else:
            gap = self.gaps.get(self.name)
            error.asked = f"{self.name}, " + (f"{gap}; then" if gap else f"asked for {self.asked}")


def difference(found, expected, bound=0.0):
    """Say how an answer differs from the right one.  -> text, "" if it does not"""
    if isinstance(expected, np.ndarray):
        return of_arrays(found, expected, bound)
    if isinstance(expected, (list, tuple)):
        return of_lists(found, expected, bound)
    if isinstance(expected, dict):
        if not isinstance(found, dict) or list(found) != list(expected):
            return f"expected {expected}, found {found}"
        return difference(list(found.values()), list(expected.values()), bound)
    number = isinstance(expected, (int, float, np.number))
    if number and not isinstance(found, (int, float, np.number)):
        return f"expected the number {expected}, found {brief(found)}"
    equal = abs(found - expected) <= bound * abs(expected) if number else found == expected
    return "" if equal else f"expected {brief(expected)}, found {brief(found)}"


def of_lists(found, expected, bound):
    """The first entry that differs; lists, tuples and named tuples are the same."""
    if not isinstance(found, (list, tuple)) or len(found) != len(expected):
        return f"expected {brief(expected)}, found {brief(found)}"
    gaps = [difference(*pair, bound) for pair in zip(found, expected)]
    return next((f"entry {i}: {gap}" for i, gap in enumerate(gaps) if gap), "")


def of_arrays(found, expected, bound):
    """Type and shape, or the element that differs most."""
    if not isinstance(found, np.ndarray) or (found.dtype, found.shape) != (
            expected.dtype, expected.shape):
        return f"expected {kind(expected)}, found {kind(found)}"
    if not expected.size:
        return ""
    gap = np.abs(found - expected) if expected.dtype != bool else found != expected
    at = np.unravel_index(np.argmax(np.where(gap == gap, gap, np.inf)), gap.shape)
    if gap[at] <= bound * np.abs(expected).max():
        return ""
    return (f"at {list(map(int, at))} expected {brief(expected[at])}, found {brief(found[at])}"
            if at else f"expected {brief(expected[at])}, found {brief(found[at])}")


def kind(x):
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, np.ndarray) else brief(x)


def brief(x):
    """A value as one short text."""
    text = f"{x:.10g}" if isinstance(x, (float, np.floating)) else " ".join(str(x).split())
    return text if len(text) <= 60 else text[:57] + "..."
