"""HTML from what lessons and modules hold: paragraphs, tables, coloured source; nothing runs here.

    prose(lines)      -> <p> for sentences, <pre> for what is drawn with characters
    highlight(text)   -> Python with <span>s, by the standard library's tokenize
    unsolved(module)  -> a module's source without the bodies of the exercises' functions
"""
import ast
import inspect
import io
import keyword
import re
import textwrap
import tokenize
from html import escape

from lessons import tables

DRAWN = re.compile(r"^\s|\S {2,}\S")                     # columns: not to be wrapped
LEFT_OUT = "...    # an exercise: left out on these pages"


def tag(name, content="", **attributes):
    """Write one element; content is HTML already.  class_="x" -> class="x", to_x=1 -> to-x="1" """
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
                    for key, value in attributes.items() if value is not None)
    return f"<{name}{given}>{content}</{name}>"


def own(text, name="p", **attributes):
    """Text that belongs to the pages, not to a lesson's run: it holds no claim."""
    return tag(name, escape(text), class_="own", **attributes)


def prose(lines):
    """Paragraphs where lines are sentences, as printed where they are drawings."""
    blocks, found = [], []
    for line in textwrap.dedent("\n".join(lines)).split("\n"):
        drawn = bool(DRAWN.search(line))
        if not line.strip():
            blocks.append((None, []))
        elif blocks and blocks[-1][0] == drawn:
            blocks[-1][1].append(line)
        else:
            blocks.append((drawn, [line]))
    for drawn, block in blocks:
        if block:
            drawn = drawn and (len(block) > 1 or block[0][0] == " ")
            text = escape("\n".join(block))
            found.append(scrolled(tag("pre", text)) if drawn else tag("p", text))
    return "\n".join(found)


def scrolled(content):
    """A box of its own for what may be wider than a narrow screen; by keyboard, too."""
    return tag("div", content, class_="wide", tabindex=0, role="group",
               aria_label="may be scrolled sideways")


def table(header, rows):
    """A table whose numbers stand to the right, as the kit prints it."""
    cells = [[tables.cell(value) for value in row] for row in rows]
    right = [all(map(tables.NUMBER.fullmatch, column)) for column in zip(*cells)]
    right += [False] * (len(header) - len(right))
    head = "".join(tag("th", escape(tables.cell(text)), scope="col", class_="n" if r else None)
                   for text, r in zip(header, right))
    body = "\n".join(tag("tr", "".join(tag("td", escape(text), class_="n" if r else None)
                                       for text, r in zip(row, right))) for row in cells)
    return scrolled(tag("table", f"<thead>{tag('tr', head)}</thead>\n<tbody>\n{body}\n</tbody>"))


# ---- source

def source(text, anchors=False):
    """A box with Python in colour; anchors: links may lead to what it defines."""
    return scrolled(tag("pre", tag("code", highlight(text, anchors))))


def highlight(text, anchors):
    """Colour Python; what cannot be read as Python, a part of a function say, stays plain."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return escape(text)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found, at, before, seen = [], 0, None, set()
    for token in tokens:
        begin, end = (starts[min(row - 1, len(starts) - 1)] + column
                      for row, column in (token.start, token.end))
        begin = max(begin, at)                           # the middle of an f-string may say less
        if style := colour(token, before):
            first = anchors and style == "d" and before.start[1] == 0 and token.string not in seen
            seen.add(token.string)
            found += [escape(text[at:begin]), tag("span", escape(text[begin:end]), class_=style,
                                                  id=token.string if first else None)]
            at = end
        before = token
    return "".join(found) + escape(text[at:])


def colour(token, before):
    """Name the style of a token: keyword, string, comment, name that is defined; or None."""
    if token.type == tokenize.NAME and before and before.string in ("def", "class"):
        return "d"
    if token.type == tokenize.NAME and keyword.iskeyword(token.string):
        return "k"
    if token.type == tokenize.COMMENT:
        return "c"
    return "s" if "STRING" in tokenize.tok_name[token.type] else None


def unsolved(text, names):
    """The source of a module without the bodies of the functions that are named."""
    lines, kept, at = text.splitlines(), [], 0
    for node in definitions(ast.parse(text)):
        if node.name in names and node.lineno > at:
            for function in [node] if isinstance(node, ast.FunctionDef) else definitions(node):
                first = function.body[0]
                said = ast.get_docstring(function) is not None
                kept += lines[at:first.end_lineno if said else first.lineno - 1]
                kept.append(" " * first.col_offset + LEFT_OUT)
                at = function.end_lineno
    return "\n".join(kept + lines[at:]) + "\n"


def definitions(node):
    return [inner for inner in node.body if isinstance(inner, (ast.FunctionDef, ast.ClassDef))]


def quoted(function, lines, left_out):
    """What a lesson quotes of a function: its lines, or of an exercise the signature alone."""
    if (function.__module__, function.__qualname__.split(".")[0]) not in left_out:
        return "\n".join(lines) + "\n"
    text = textwrap.dedent(inspect.getsource(function))
    return unsolved(text, {function.__name__})
