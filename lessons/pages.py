"""Write the course as static pages: what every lesson prints, the pictures, the library's source.

    python -m lessons --html DIR [--lessons tp pp ...]         then open DIR/index.html

Each lesson is run once, on four thread ranks, and its page shows what that run printed: no page
says more. The bodies of the exercises' functions are on no page. A second build is the same byte
for byte, but for what rests on a clock (<time>, sections of class "clock" and their pictures) or,
under a planted bug, on which rank met it first (class "symptoms").
"""
import functools
import importlib
import inspect
import os
import re
import shutil
from pathlib import Path

import minidist
from lessons import exercises, kit, look, printed, script, stepping
from lessons.markup import escape, own, scrolled, source, tag, unsolved
from lessons.record import Record
from minidist import BadInput, files
from minidist.ranks import environment

RANKS = 4
ROOT = printed.ROOT


def build(folder, wanted=None):
    """Write everything into a new folder.  -> exit status, 1 if a lesson did not prove itself"""
    names, part = script.chosen(wanted), f"{folder.rstrip(os.sep)}.part"
    if (environment.size() or 1) > 1:
        raise BadInput("one process writes the pages: leave mpirun out")
    if os.path.lexists(folder) and not (os.path.isdir(folder) and not os.listdir(folder)):
        raise BadInput(f"{folder} is there already; name a new folder")
    files.drawable()
    try:
        shutil.rmtree(part, ignore_errors=True)
        good = fill(part, names)
        os.replace(part, folder)
    except OSError as error:
        raise BadInput(f"cannot write {folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"\n{folder}/index.html")
    return 0 if good else 1


def fill(folder, names):
    """Run the lessons and write their pages.  -> did all prove themselves?"""
    good = True
    for path, text in fixed(names):
        write(folder, path, text)
    for name in names:
        plan, record, result = run(name, folder)
        write(folder, f"{name}.html", lesson_page(plan, record, names))
        print(f"  {name:12} {result['seconds']:5.1f} s" + "  FAILED" * (not result["ok"]))
        good = good and result["ok"]
    return good


def write(folder, path, text):
    Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
    Path(folder, path).write_text(text, encoding="utf-8")


def screens(name):
    return importlib.import_module(f"lessons.{name}").SCREENS


def run(name, folder):
    """Run one lesson, its picture into the folder.  -> Script, Record, its JSON dict"""
    record, argv = Record(), ["--out", os.path.join(folder, "pictures")]
    result = kit.run_on_threads(screens(name), RANKS, argv, record)
    return script.read(screens(name)), record, result


def fixed(names):
    """All that no lesson has to run for.  -> (path, text)"""
    yield "index.html", index(names)
    yield "stepping.html", stepping_page(names)
    yield "style.css", look.style()
    yield "step.js", look.SCRIPT
    left_out = solutions()
    for path in sources():
        module = module_of(path)
        hidden = {name for where, name in left_out if where == module}
        yield f"source/{module}.html", source_page(module, path, hidden, names)


def sources():
    """The files that are shown: the library, and the lessons' own scripts."""
    return sorted((ROOT / "minidist").rglob("*.py")) + [
        ROOT / "lessons" / f"{name}.py" for name in script.names()]


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def solutions():
    """What is left out: (module, name) of every exercise's functions and of their own helpers."""
    found = [f for name in script.names() for f in screens(name)[0].__globals__.get("EXERCISE", ())]
    return {(f.__module__, f.__qualname__.split(".")[0])
            for f in found + exercises.withheld(found)}


# ---- frame

def page(title, body, links=(), deep=""):
    """A whole page.  links: (address, text) above and below; deep: "../" from a folder"""
    bar = "\n".join(tag("a", escape(text), href=deep + address) for address, text in links)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="stylesheet" href="{deep}style.css">
<script src="{deep}step.js" defer></script>
</head>
<body>
<a class="skip" href="#the-text">to the text</a>
<nav aria-label="course">
{bar}
</nav>
<main id="the-text">
{body}
</main>
<nav aria-label="course, below">
{bar}
</nav>
</body>
</html>
"""


def index(names):
    """The reading order, and the map of the library."""
    order = [(name, title, question) for name, title, question in script.existing()
             if name in names]
    rows = "\n".join(tag("tr", "".join(tag("td", cell) for cell in (
        tag("a", escape(title), href=f"{name}.html"), escape(question))))
        for name, title, question in order)
    first, _, rest = inspect.getdoc(minidist).partition("\n\n")
    return page("minidist", "\n".join([
        tag("h1", "minidist"), tag("p", escape(first), class_="question"),
        tag("h2", "Lessons, in reading order", id="lessons"),
        tag("table", f"<tbody>\n{rows}\n</tbody>", class_="toc"),
        own("Step by step", "h2", id="pictures"),
        tag("p", tag("a", "schedules and meshes", href="stepping.html")),
        tag("h2", "The library", id="library"), atlas(rest.rpartition("\n\n")[0].splitlines()),
        own("What a lesson's page says, a run of that lesson printed; beside it stand the "
            "lesson's source and the library's.")]))


def atlas(lines):
    """The map of the library, with links in its last column."""
    column, room, found = re.search(r"\S\s+\S.*?\s{2,}(\S)", lines[0]).start(1), "", []
    for line in lines:
        head, names = line[:column], line[column:]
        if head.strip() and head[4] != " ":
            room = head.split("/")[0].strip() + "." if "/" in head else ""
        found.append(escape(head) + re.sub(r"\w+", lambda word, room=room: tag(
            "a", word[0], href=f"source/minidist.{room}{word[0]}.html"), names))
    return scrolled(tag("pre", "\n".join(found)))


def stepping_page(names):
    """The pictures that can be stepped through, with links to the lessons on what they show."""
    parts = [own("Step by step", "h1"),
             own("With the focus on a picture, the right and left arrow keys step through it, Home "
                 "and End go to its first and last step, Escape shows it whole."),
             own("F: forward of a micro-batch. B: backward. I and W: its halves, the gradients of "
                 "inputs and of weights. F, I and W take one unit of time, B takes two.")]
    for title, figures in stepping.drawings():
        parts += [own(title, "h2", id=title.lower()), *figures]
    links = [(f"{name}.html", f"lessons.{name}") for name in names if steps(name)]
    return page("Step by step", "\n".join(parts), [("index.html", "course"), *links])


def steps(name):
    """Is a lesson on what can be stepped through?"""
    code = " ".join(line for line in script.read(screens(name)).header if " code " in line)
    return bool(re.search(r"\b(schedules|mesh)\.py", code))


def source_page(module, path, hidden, names):
    """One module, in colour, without what is an exercise; links to the lessons that it names."""
    text = path.read_text(encoding="utf-8")
    note = own("The bodies of functions that are exercises are left out.") if hidden else ""
    named = dict.fromkeys(re.findall(r"lessons\.(\w+)", text))
    links = [(f"{name}.html", f"lessons.{name}") for name in named if name in names]
    return page(module, "\n".join([tag("h1", escape(module)), note, source(
        unsolved(text, hidden), anchors=True)]), [("index.html", "course"), *links], "../")


# ---- a lesson

def lesson_page(plan, record, names):
    """What one run printed, screen by screen."""
    at, titles = names.index(plan.name), dict((n, t) for n, t, _ in script.existing())
    around = [(f"{names[i]}.html", f"{word}: {titles[names[i]]}")
              for word, i in (("before", at - 1), ("next", at + 1)) if 0 <= i < len(names)]
    parts = [tag("h1", escape(plan.title)), tag("p", escape(plan.question), class_="question"),
             *printed.everything(plan, record, solutions())]
    more = [(f"source/lessons.{plan.name}.html", "its source")]
    more += [("stepping.html", "step by step")] if steps(plan.name) else []
    return page(plan.title, "\n".join(parts), [("index.html", "course"), *around, *more])
