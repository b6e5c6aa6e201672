"""The course as pages: valid, linked, readable, the same each time; no claim that no run printed,
and no solution."""
import ast
import functools
import html
import inspect
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from lessons import exercises, look, markup, pages, record, script, stepping
from lessons.__main__ import main
from minidist import BadInput, schedules

SHOWN = ["ring", "precision"]      # one reads clocks; of one, the bug meets any of the ranks first
VOID = {"meta", "link", "img", "br"}
BLOCKS = {"p", "tr", "pre", "h1", "h2", "summary", "dt", "dd", "figcaption", "text"}


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
    assert {"index.html", "ring.html", "precision.html", "style.css", "step.js",
            "pictures/ring.png", "source/minidist.tp.html"} <= files.keys()
    for path, page in read.items():
        assert not page.wrong, f"{path}: {page.wrong}"
        for link in page.links:
            where, _, anchor = link.partition("#")
            parts = [*Path(path).parts[:-1], *Path(where).parts] if where else Path(path).parts
            target = "/".join(parts).replace("source/../", "")
            assert target in files, f"{path} links to {link}"
            assert not anchor or anchor in read[target].ids, f"{path} links to {link}"


def test_source_is_shown_to_the_letter(read):
    """But for the bodies that are left out."""
    for path in pages.sources():
        page = read[f"source/{pages.module_of(path)}.html"]
        hidden = {name for module, name in pages.solutions() if module == pages.module_of(path)}
        assert page.code == [path.read_text()] if not hidden else markup.LEFT_OUT in page.code[0]


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
    return [block for block in page.blocks if block not in said
            and not re.fullmatch(r"minidist\.[\w.]+", block)] + [       # above what is quoted
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
    assert b'<section class="clock">' not in built[0][0]["precision.html"]


def timeless(data):
    return re.sub(rb'<section class="clock">.*?</section>|<time>.*?</time>'
                  rb'|<aside class="symptoms">.*?</aside>', b"", data, flags=re.S)


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
    for module, name in pages.solutions():
        code = ast.parse(read[f"source/{module}.html"].code[0]).body
        [function] = [node for node in code if getattr(node, "name", "") == name]
        kept = function.body[ast.get_docstring(function) is not None:]
        assert [ast.unparse(node) for node in kept] == ["..."], f"{module}.{name}"
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


# ---- step by step

def test_schedules_show_what_was_simulated_and_each_step_who_is_busy():
    figures = stepping.drawings()[0][1]
    assert len(figures) == len(schedules.ORDERS)
    for name, figure in zip(schedules.ORDERS, figures):
        made = schedules.make(name, stepping.RANKS, stepping.MICROBATCHES)
        steps = json.loads(html.unescape(re.search(r'data-steps="([^"]*)"', figure)[1]))
        parts = re.findall(r'<g data-from="(\d+)" data-to="(\d+)"><rect [^>]*></rect>'
                           r'<text [^>]*>(\w+)<', figure)
        assert len(parts) == sum(map(len, made.actions))
        for k, step in enumerate(steps):
            drawn = sorted(label for a, b, label in parts if int(a) <= k < int(b))
            assert drawn == sorted(re.findall(r"rank \d (?!idle)(\w+)", step))
        assert f"{name}: 4 ranks, 6 micro-batches" in figure
    assert "idle / working time 0.500" in figures[list(schedules.ORDERS).index("1f1b")]   # 3 / 6


def test_meshes_show_the_groups_of_every_axis():
    cube = stepping.groups(dict(pp=2, dp=2, tp=2))
    steps = json.loads(html.unescape(re.search(r'data-steps="([^"]*)"', cube)[1]))
    by_hand = dict(tp=["0, 1", "2, 3", "4, 5", "6, 7"], dp=["0, 2", "1, 3", "4, 6", "5, 7"],
                   pp=["0, 4", "1, 5", "2, 6", "3, 7"])
    assert steps == [f"{axis} group {i}: ranks {ranks}" for axis, all_of in by_hand.items()
                     for i, ranks in enumerate(all_of)]
    parts = re.findall(r'data-from="(\d+)" data-to="\d+"><rect.*?>rank (\d)</text><text[^>]*>'
                       r'(group \d)<', cube)
    assert len(parts) == 24
    for k, rank, group in parts:
        assert group in steps[int(k)] and rank in steps[int(k)].split("ranks ")[1]


# ---- in a browser

BROWSER = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])),
               None)
PROBE = """<script>
const errors = [];
addEventListener("error", (e) => errors.push(e.message || "cannot load " + e.target.src), true);
addEventListener("load", () => {
  const seen = [], figure = document.querySelector("figure[data-steps]");
  const press = (key, on) => on.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
  for (const key of figure ? ["ArrowRight", "ArrowRight", "ArrowLeft", "End", "Escape"] : []) {
    press(key, figure);
    const [now, later] = [".now", ".later"].map((c) => figure.querySelectorAll(c).length);
    seen.push([key, now, later, figure.querySelector("output").textContent]);
  }
  if (figure) press("End", figure.querySelector(".wide"));         // scrolls, and no more
  if (figure) seen.push(figure.querySelector("output").textContent);
  const whole = document.documentElement, ground = getComputedStyle(whole).backgroundColor;
  parent.postMessage({page: document.title, errors, seen, wide: whole.scrollWidth, ground,
                      room: innerWidth}, "*");
});
</script>"""
FRAMES = """<!DOCTYPE html><body><pre></pre><script>
const found = [];
addEventListener("message", (e) => { found.push(e.data); next(); });
const pages = %s;
function next() {
  const page = pages.shift();
  if (!page) { document.querySelector("pre").textContent = JSON.stringify(found); return; }
  const frame = document.createElement("iframe");
  frame.width = 400; frame.height = 600; frame.src = page;
  document.body.append(frame);
}
next();
</script>"""


def browse(folder, page, *flags):
    return subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={folder}/profile", *flags, f"file://{folder}/{page}"],
        capture_output=True, text=True, timeout=120).stdout


@pytest.fixture(scope="module")
def opened(built, tmp_path_factory):
    """The pages on disk, each with a probe in it."""
    if BROWSER is None:
        pytest.skip("no browser is installed")
    folder = tmp_path_factory.mktemp("browser")
    for path, data in built[0][0].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data.replace(b"<head>", b"<head>" + PROBE.encode())
                                    if path.endswith(".html") else data)
    return folder


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_finds_no_error_and_nothing_too_wide_for_400_pixels(opened, dark):
    shown = ["index.html", "stepping.html", *(f"{name}.html" for name in SHOWN),
             "source/minidist.tp.html"]
    (opened / "frames.html").write_text(FRAMES % json.dumps(shown))
    flags = ["--blink-settings=preferredColorScheme=0"] if dark else []
    text = browse(opened, "frames.html", "--virtual-time-budget=20000", "--dump-dom", *flags)
    found = json.loads(html.unescape(re.search("<pre>(.*?)</pre>", text)[1]))
    assert len(found) == len(shown)
    ground = tuple(int(look.COLORS["paper"][dark][i:i + 2], 16) for i in (1, 3, 5))
    for page in found:
        assert not page["errors"] and page["wide"] <= page["room"] == 400, page
        assert page["ground"] == f"rgb{ground}"
    steps = next(page["seen"] for page in found if page["page"] == "Step by step")
    naive = "time {}: rank 0 {}, rank 1 {}, rank 2 idle, rank 3 idle".format
    assert [step[3] for step in steps[:3]] == [
        "1/48  " + naive(0, "F0", "idle"), "2/48  " + naive(1, "idle", "F0"),
        "1/48  " + naive(0, "F0", "idle")]
    assert [step[1:3] for step in steps[:5]] == [[1, 47], [1, 46], [1, 47], [1, 0], [0, 0]]
    assert steps[3][3].startswith("48/48") and steps[5] == ""


def test_a_picture_of_a_page_shows_something(opened):
    browse(opened, "ring.html", "--window-size=800,1200", f"--screenshot={opened}/shot.png")
    pixels = image.imread(opened / "shot.png")[..., :3].reshape(-1, 3)
    colors, count = np.unique(pixels.round(3), axis=0, return_counts=True)
    assert len(colors) > 20 and 0.3 < count.max() / count.sum() < 0.97


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


@pytest.mark.parametrize("ok, status", [(True, 0), (False, 1)])
def test_a_lesson_that_fails_is_said(ok, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, "fixed", lambda names: [])
    monkeypatch.setattr(pages, "lesson_page", lambda *all_of: "")
    monkeypatch.setattr(pages, "run", lambda *all_of: (None, None, dict(seconds=0.0, ok=ok)))
    assert pages.build(str(tmp_path / "new"), ["ring"]) == status
    assert ("FAILED" in capsys.readouterr().out) is not ok


def test_what_stops_half_way_leaves_nothing(tmp_path, monkeypatch):
    def stop(*all_of):
        raise KeyboardInterrupt

    monkeypatch.setattr(pages, "fixed", lambda names: [("index.html", "")])
    monkeypatch.setattr(pages, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        pages.build(str(tmp_path / "new"), ["ring"])
    assert not list(tmp_path.iterdir())
