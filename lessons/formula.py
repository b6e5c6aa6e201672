"""Work out a formula as one writes it on paper: letters side by side are multiplied.

    value("2(p-1)/p S", dict(p=4, S=8000))  -> 12000.0
"""
import math
import re

FUNCTIONS = {"ceil": math.ceil, "floor": math.floor, "log2": math.log2, "max": max, "min": min}
TOKEN = re.compile(r"\s*(\d+\.?\d*|[A-Za-z_]\w*|\S)")


def value(formula, letters):
    """Compute a formula from the values of its letters.  x is times, ^ is power"""
    text, last = "", ""
    for token in TOKEN.findall(formula):
        if token == "x" or token == "^":
            text += {"x": "*", "^": "**"}[token]
        else:
            side_by_side = ends(last) and (token[0].isalnum() or token in "(")
            text += ("*" if side_by_side else "") + token
        last = token
    return eval(text, {"__builtins__": {}}, {**FUNCTIONS, **letters})


def ends(token):
    """Whether a token ends a factor, so that a letter after it means times."""
    return token not in FUNCTIONS and token != "x" and (token == ")" or token[:1].isalnum())


def used(formula, letters):
    """The letters that occur in a formula, in the order given."""
    tokens = TOKEN.findall(formula)
    return [letter for letter in letters if letter in tokens]
