"""Text for a screen: tables, folded names, sizes and times, and the code that matters."""
import ast
import inspect
import re
import textwrap

import numpy as np

WIDTH = 100
NUMBER = re.compile(r"-|[-+]?[\d.]+(e[-+]\d+)?( ?[%a-zA-Z]{1,5})?|")       # also 36.9 kB, 28.1 %


def table(header, rows):
    """Lay out rows under a header: text to the left, numbers to the right.  -> lines"""
    cells = [[cell(value) for value in row] for row in rows]
    columns = list(zip(*([header] + cells)))
    widths = [max(map(len, column)) for column in columns]
    right = [all(map(NUMBER.fullmatch, column[1:])) for column in columns]
    return ["  ".join(text.rjust(w) if r else text.ljust(w)
                      for text, w, r in zip(row, widths, right)).rstrip()
            for row in [header] + cells]


def cell(value):
    """Write one value: whole numbers in full, others to six digits, arrays as lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return "[" + " ".join(map(cell, value)) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def fold(rows):
    """Merge rows whose names differ in the layer number only: blocks.0, blocks.1 -> blocks.*"""
    folded = {}
    for name, *rest in rows:
        key = re.sub(r"\.\d+(?=\.|$)", ".*", name), *map(cell, rest)
        folded.setdefault(key, []).append((name, *rest))
    return [(f"{key[0]}  x{len(same)}" if len(same) > 1 else same[0][0], *same[0][1:])
            for key, same in folded.items()]


def size(nbytes):
    """Write a number of bytes with a decimal unit (1 kB = 1000 bytes): 147456 -> '147.5 kB'"""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while nbytes >= 1000 and len(units) > 1:
        nbytes, units = nbytes / 1000, units[1:]
    return f"{nbytes:.4g} {units[0]}"


def duration(seconds):
    """Write a time with a unit that leaves one to three digits before the point."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def code(function, first=None, last=None):
    """Quote a function's source without decorators and docstring; first, last: text of the
    first and last line wanted.  -> lines"""
    text = textwrap.dedent(inspect.getsource(function))
    lines = without_docstring(text).splitlines()
    begin = next(i for i, line in enumerate(lines) if first is None or first in line)
    end = next((i for i, line in enumerate(lines) if last and i >= begin and last in line),
               len(lines) - 1)
    return textwrap.dedent("\n".join(lines[begin:end + 1])).splitlines()


def without_docstring(text):
    """Drop decorators and docstring from the source of one function."""
    node, lines = ast.parse(text).body[0], text.splitlines()
    if ast.get_docstring(node) is not None:
        doc = node.body[0]
        instead = [] if len(node.body) > 1 else [" " * doc.col_offset + "pass"]
        lines[doc.lineno - 1:doc.end_lineno] = instead
    return "\n".join(lines[node.lineno - 1:])


def relative(error):
    """Write an error bound or an error: exact zero as 0, others as 1.2e-15."""
    return "0" if error == 0 else f"{error:.1e}"


def difference(x, reference):
    """Relative difference, max|x - reference| / max|reference|; inf if shapes differ."""
    x, reference = np.asarray(x), np.asarray(reference)
    if x.shape != reference.shape:
        return float("inf")
    if not x.size:
        return 0.0
    scale = float(np.max(np.abs(reference))) or 1.0
    return float(np.max(np.abs(x - reference))) / scale
