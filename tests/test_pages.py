"""The course as pages: valid, linked, readable, the same each time; no claim that no run printed,
and no solution."""
import ast
import functools
import html
import inspect
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lessons import exercises, look, markup, pages, record, script
from lessons.__main__ import main
from minidist import BadInput

SHOWN = ["ring", "schedules"]                 # one that reads clocks, one that one rank runs
VOID = {"meta", "link", "img", "br"}
BLOCKS = {"p", "tr", "pre", "h1", "h2", "summary", "dt", "dd", "figcaption"}


class Checked(HTMLParser):
    """Reads a page: what is wrong with it, where it leads, and its blocks of text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.wrong, self.ids, self.links, self.blocks = [], [], [], [], []
        self.lang = self.block = None
        self.own, self.code, self.count = 0, [], {}
        self.feed(text)
        self.close()
        self.wrong += [f"<{name}> is left open" for name in self.open]
        self.wrong += [f"id {name} twice" for name in set(self.ids) if self.ids.count(name) > 1]
        if self.count.get("h1") != 1 or self.lang != "en" or self.count.get("title") != 1:
            self.wrong.append("one h1, one title and a language, please")

    def handle_starttag(self, name, attributes):
        given = dict(attributes)
        self.count[name] = self.count.get(name, 0) + 1
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[key] for key in ("href", "src") if key in given]
        self.lang = given.get("lang", self.lang)
        if name == "img" and not given.get("alt"):
            self.wrong.append(f"no alt text: {given}")
        if name not in VOID:
            self.open.append(name)
        if "own" in (given.get("class") or "").split() or self.own:
            self.own += name not in VOID
        elif name in BLOCKS:
            self.block = []
        if name == "code":
            self.code.append("")

    def handle_endtag(self, name):
        if not self.open or self.open.pop() != name:
            self.wrong.append(f"</{name}> closes nothing")
        self.own = max(0, self.own - 1)
        if name in ("td", "th") and self.block is not None:
            self.block.append(" ")
        if name in BLOCKS and self.block is not None:
            self.blocks.append(one_line("".join(self.block)))
            self.block = None

    def handle_data(self, text):
        if "code" in self.open:
            self.code[-1] += text
        elif self.block is not None and not self.own:
            self.block.append(text)
        elif text.strip() and "main" in self.open and not self.own and "time" not in self.open:
            self.wrong.append(f"text in no block: {text!r}")


def one_line(text):
    return " ".join(text.split())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Two builds.  -> [{path: bytes}, ...], what the first one's lessons printed"""
    folder, printed = tmp_path_factory.mktemp("pages"), {}
    run, fixed, kept = pages.run, pages.fixed, []

    def watched(name, where):
        plan, lines, result = run(name, where)
        printed.setdefault(name, lines.getvalue())
        return plan, lines, result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "run", watched)
        patch.setattr(pages, "fixed", lambda names: kept or kept.extend(fixed(names)) or kept)
        assert [pages.build(str(folder / each), SHOWN) for each in "ab"] == [0, 0]
    return [{str(path.relative_to(folder / each)): path.read_bytes()
             for path in (folder / each).rglob("*") if path.is_file()} for each in "ab"], printed


@pytest.fixture(scope="module")
def read(built):
    return {path: Checked(data.decode()) for path, data in built[0][0].items()
            if path.endswith(".html")}


def test_pages_are_valid_and_their_links_lead_somewhere(built, read):
    files = built[0][0]
    assert {"index.html", "ring.html", "schedules.html", "style.css", "step.js",
            "pictures/ring.png", "source/minidist.tp.html"} <= files.keys()
    for path, page in read.items():
        assert not page.wrong, f"{path}: {page.wrong}"
        for link in page.links:
            where, _, anchor = link.partition("#")
            parts = [*Path(path).parts[:-1], *Path(where).parts] if where else Path(path).parts
            target = "/".join(parts).replace("source/../", "")
            assert target in files, f"{path} links to {link}"
            assert not anchor or anchor in read[target].ids, f"{path} links to {link}"


@pytest.mark.parametrize("text", [
    "<p>", "</p>", "<p><b></p></b>", '<p id="a"></p><p id="a"></p>', '<img src="x">', "",
    "<h1></h1>", "<main>text</main>"])
def test_what_is_wrong_with_a_page_is_found(text):
    frame = '<html lang="en"><title></title><h1></h1>{}</html>'
    assert not Checked(frame.format("<p>right</p>")).wrong
    assert Checked(frame.format(text) if text else "<h1></h1>").wrong


def unclaimed(page, printed, name):
    """Blocks of a page that neither the run printed nor the lesson's and library's source holds."""
    said = one_line(printed + " " + " ".join(title for title, _ in headed(name)))
    code = {line.strip() for path in pages.sources() for line in path.read_text().splitlines()}
    code |= {"raise NotImplementedError", markup.LEFT_OUT}
    return [block for block in page.blocks if block not in said] + [
        line for text in page.code for line in text.splitlines() if line.strip() not in code]


def headed(name):
    return [(title, question) for at, title, question in script.existing() if at == name]


@pytest.mark.parametrize("name", SHOWN)
def test_no_page_claims_what_no_run_printed(built, read, name):
    page, printed = read[f"{name}.html"], built[1][name]
    assert len(page.blocks) > 30 and not unclaimed(page, printed, name)
    claims = "<main><p>faster by 17.3 %</p><pre><code>x = 17.3\n</code></pre></main>"
    assert unclaimed(Checked(claims), printed, name) == ["faster by 17.3 %", "x = 17.3"]


def test_words_of_the_pages_own_hold_no_figure(built):
    for path, data in built[0][0].items():
        if path.endswith(".html"):
            own = re.findall(r'class="own"[^>]*>([^<]*)<', data.decode())
            assert not re.search(r"\d", html.unescape(" ".join(own))), path


def test_a_second_build_is_the_same_but_for_its_clocks(built):
    """And clocks are where they are said to be: without the cut, the ring's page differs."""
    first, second = ({path: timeless(data) for path, data in files.items()} for files in built[0])
    assert first.keys() == second.keys()
    differ = {path for path in first if first[path] != second[path]}
    assert differ <= {"pictures/ring.png"}                       # of what its clock said
    assert built[0][0]["ring.html"] != built[0][1]["ring.html"]
    assert b'<section class="clock">' not in built[0][0]["schedules.html"]


def timeless(data):
    return re.sub(rb'<section class="clock">.*?</section>|<time>.*?</time>', b"", data, flags=re.S)


def test_screens_that_read_a_clock_are_known():
    ring = pages.screens("ring")
    assert [f.__name__ for f in ring[:-1] if record.timed(f)] == ["small_messages"]


# ---- no solutions

@functools.cache
def bodies():
    """{the text of the body of an exercise's function: its name}, where it is no single line"""
    found = {}
    for function in [f for name in script.names()
                     for f in script.read(pages.screens(name)).exercise]:
        text = exercises.source(function)
        node = ast.parse(text).body[0]
        said = ast.get_docstring(node) is not None
        lines = text.splitlines()[node.body[said].lineno - 1:] if len(node.body) > said else []
        found[one_line(" ".join(lines))] = function.__qualname__
    return found


def solved(text):
    return [name for body, name in bodies().items() if len(body) > 60 and body in one_line(text)]


def test_no_page_holds_a_solution(read):
    assert len(bodies()) > 40
    for path, page in read.items():
        assert not any(map(solved, page.code)), path
        if path.startswith("source/"):
            ast.parse(page.code[0])
    ring = "minidist.collectives.ring"
    text = (pages.ROOT / "minidist/collectives/ring.py").read_text()
    assert solved(text) == ["reduce_scatter", "all_gather", "all_reduce"]
    assert "def all_gather" in read[f"source/{ring}.html"].code[0]


def test_functions_that_are_quoted_elsewhere_keep_their_signature_only():
    from minidist.collectives import ring
    lines = inspect.getsource(ring.all_gather).splitlines()
    whole = markup.quoted(ring.all_gather, lines, set())
    kept = markup.quoted(ring.all_gather, lines, pages.solutions())
    assert solved(whole) and not solved(kept) and markup.LEFT_OUT in kept
    assert kept.startswith("def all_gather(")


# ---- how it looks

def luminance(color):
    parts = [int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(a, b):
    low, high = sorted(map(luminance, (a, b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read(theme):
    assert round(contrast("#000000", "#ffffff"), 2) == 21 and contrast("#777777", "#ffffff") < 4.5
    poor = [(name, ground) for name, grounds in look.READ_ON.items() for ground in grounds.split()
            if contrast(look.COLORS[name][theme], look.COLORS[ground][theme]) < 4.5]
    assert not poor


def test_the_style_sheet_uses_the_colours_and_no_other():
    rules = look.RULES + look.PRINT
    used = set(re.findall(r"var\(--(\w+)\)", rules))
    assert used <= look.COLORS.keys() and set(look.READ_ON) <= used
    assert set(re.findall(r"#[0-9a-f]{3,6}\b", rules)) == {"#fff"}      # behind PNG pictures
    assert look.style().count("{") == look.style().count("}")
    assert not re.search(r"url\(|@import|https?:", rules + look.SCRIPT)


# ---- bad input

@pytest.mark.parametrize("argv, said", [
    (["--html", "."], "is there already"), (["--html", "new", "--lessons", "rings"], "no lesson"),
    (["--lessons", "ring"], "goes with --html")])
def test_what_cannot_be_written_is_one_sentence(argv, said, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lessons", *argv])
    with pytest.raises(BadInput, match=said):
        main()
