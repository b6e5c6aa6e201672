"""Remember what a lesson prints, and how each line came about: lessons.pages shows it as HTML.

    record = Record();  kit.run_on_threads(SCREENS, 4, out=record)
    record.getvalue()   the text          record.events   [Event("table", lines, header=, rows=)]

The kit says of each line what it is (a table's cells, a question and its answer, a function that
is quoted), so nothing has to be guessed from the text.
"""
import inspect
import io
import re
from types import SimpleNamespace

CLOCK = re.compile(r"\bclock\.|\bperf_counter\b")


class Record(io.StringIO):
    """A text file that also lists what is printed into it."""

    def __init__(self):
        super().__init__()
        self.events = []

    def remember(self, lines, kind="words", **what):
        """Take one call of the kit, with the lines that it printed."""
        self.events.append(SimpleNamespace(kind=kind, lines=[str(line) for line in lines], **what))

    def screens(self):
        """Group the events by screen.  -> [(heading, events)]; before the first: heading None"""
        found = [(None, [])]
        for event in self.events:
            if event.kind == "heading":
                found.append((event, []))
            else:
                found[-1][1].append(event)
        return found


def timed(screen):
    """Does what a screen shows rest on a clock, by its own code or by that of lessons' helpers?"""
    seen, todo = set(), [screen]
    while todo:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        text = inspect.getsource(function)
        if CLOCK.search(text):
            return True
        todo += [f for f in named(text, function.__globals__)
                 if inspect.isfunction(f) and f.__module__.startswith("lessons.")]
    return False


def named(text, names):
    """What the names in a text stand for, and names of modules' functions such as clock.best."""
    for module, name in re.findall(r"(?:\b(\w+)\.)?\b([a-z_]\w*)\b", text):
        if inspect.ismodule(names.get(module)):
            yield getattr(names[module], name, None)
        elif not module:
            yield names.get(name)
