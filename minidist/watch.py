"""Who waits for whom: one status per thread of a rank, and the report made of them."""
import os
import sys
from dataclasses import dataclass

HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Status:
    """What one thread of a rank is doing: a tuple, or None while it computes."""
    now = None


@dataclass
class Row:
    """One line of the report."""
    rank: int
    doing: str
    line: str = ""
    left: bool = False


def describe(now):
    """Say in words what a status tuple (label, kind, group, to, source, nbytes) stands for."""
    if now is None:
        return "computes"
    label, kind, group, to, source, nbytes = now
    text = f"waits in {kind}"
    if to is not None:
        text += f" to rank {to}"
    if source is not None:
        text += f" from rank {source}"
    if label != kind:
        text += f" of {label}"
    return text + f" ({nbytes} bytes, group {group})"


def user_line(frame):
    """The innermost line outside minidist: the reader's own code."""
    while frame.f_back and frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"


def line_of(thread):
    """Where the thread with this identifier stands in the reader's code."""
    frame = sys._current_frames().get(thread)
    return user_line(frame) if frame else ""


def explain(rows):
    """The report: one line per rank."""
    return "\n".join(["deadlock: every rank waits"]
                     + [f"  rank {r.rank} " + ("has finished" if r.left else f"{r.doing} at {r.line}")
                        for r in rows])
