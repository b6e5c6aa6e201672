"""What a lesson printed, as HTML: each event of its record, screen by screen.

    everything(plan, record, left_out)   -> the elements of the page, in the order of the run

Words are as they were printed; a table, a check, a question, a quoted function are what the kit
said they are.  left_out: (module, name) of the functions whose bodies are on no page.
"""
import inspect
import os
import re
import sys
from pathlib import Path

import minidist
from lessons import exercises
from lessons.markup import escape, own, prose, quoted, source, table, tag
from lessons.record import timed

ROOT = Path(minidist.__file__).parent.parent
MARKS = re.compile(r"(?<!\w)(EQUIVALENT|CAUGHT|WRONG)(?!\w)")


def everything(plan, record, left_out):
    """All screens; the exercise where the run names it, at its end."""
    for number, (heading, events) in enumerate(record.screens()):
        content = [show(event, heading, left_out) for event in events]
        if heading is None:
            yield from content
        else:
            yield section(number, heading, symptoms(events, content))
    if plan.exercise:
        yield assignment(plan)


def symptoms(events, content):
    """Put what a planted bug does into an element of its own: between its code and who caught it"""
    caught = [i for i, event in enumerate(events) if "CAUGHT" in " ".join(event.lines)]
    if not caught:
        return content
    first = 1 + next(i for i, event in enumerate(events) if event.kind == "code")
    shown = tag("aside", "\n".join(content[first:caught[0]]), class_="symptoms")
    return [*content[:first], shown, *content[caught[0]:]]


def section(number, heading, content):
    """One screen, and the code that printed it."""
    title, screen = heading.title, heading.screen
    bug = screen is not None and hasattr(screen, "replaces")
    clock = screen is not None and not bug and timed(screen)
    parts = [tag("h2", escape(title), id=f"screen-{number}"), *content]
    if clock:
        parts.append(own("This screen rests on a clock: another run shows other times."))
    if screen is not None and not bug:
        parts.append(tag("details", own("the code of this screen", "summary")
                         + source(inspect.getsource(screen))))
    kinds = ["bug"] * bug + ["clock"] * clock
    return tag("section", "\n".join(parts), class_=" ".join(kinds) or None)


def assignment(plan):
    """The functions to write, as --stub gives them."""
    shown = [source(exercises.empty(f)) for f in plan.exercise]
    return tag("section", "\n".join([own("The exercise", "h2", id="exercise"), *shown]))


def show(event, heading, left_out):
    """HTML of one event of a run."""
    kind = event.kind
    if kind == "header":
        return header(event.lines)
    if kind == "paragraph":
        return marked(tag("p", escape(event.text)))
    if kind == "table":
        return marked(table(event.header, event.rows))
    if kind == "code":
        return code(event, left_out)
    if kind == "question":
        answer = tag("p", tag("strong", escape(event.answer))
                     + (f": {escape(event.why)}" if event.why else ""))
        return tag("details", tag("summary", escape(event.question)) + answer, class_="guess")
    if kind == "check":
        return tag("p", tag("b", escape(event.text)) + " " + tag("span", escape(event.found)
                   + tag("em", escape(event.mark), class_=event.mark.split()[0])), class_="check")
    if kind == "picture":
        name = os.path.basename(event.path)
        return tag("figure", f'<img src="pictures/{escape(name)}" alt="{escape(heading.title)}">')
    if kind == "end":
        return tag("p", f"<time>{escape(event.took)}</time>, {escape(event.ranks)}", class_="ran")
    return marked(prose(event.lines))


def marked(text):
    """Let verdicts stand out."""
    return MARKS.sub(lambda word: tag("em", word[0], class_=word[0]), text)


def header(lines):
    """What a technique lifts and costs; its code and how to run it."""
    rows = []
    for line in lines:
        key, _, text = line.strip().partition(" ")
        if key.islower() and key != "before":              # which stands above and below
            text = modules(text) if key == "code" else escape(text)
            rows.append(tag("dt", escape(key)) + tag("dd", text.strip()))
    return tag("dl", "\n".join(rows))


def modules(text):
    """Link to the files that are named; of the folder named first, where none is given."""
    folder = os.path.dirname(re.search(r"minidist/[\w/]*", text)[0])
    for path in dict.fromkeys(re.findall(r"[\w/]+\.py", text)):
        full = path if "/" in path else f"{folder}/{path}"
        address = full.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        if (ROOT / full).exists():
            link = tag("a", escape(path), href=f"source/{address}.html")
            text = re.sub(rf"(?<![\w/]){re.escape(path)}", lambda _, link=link: link, text)
    return text


def code(event, left_out):
    """Quoted source, under the name of what it is from."""
    function = inspect.unwrap(event.function)
    text = source(quoted(function, event.code, left_out))
    if function.__module__.startswith("minidist") and function.__module__ in sys.modules:
        top = function.__qualname__.split(".")[0]
        name = f"{function.__module__}.{function.__qualname__}"
        return tag("p", tag("a", escape(name), href=f"source/{function.__module__}.html#{top}"),
                   class_="from") + text
    return text
