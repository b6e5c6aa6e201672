"""The lessons' kit, on a lesson made for the purpose."""
import io
import json
import os
import pty
import random
import sys
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

from lessons import formula, guess, kit, substitute, tables
from lessons.__main__ import ORDER, existing
from minidist import BadInput, cost, tp
from minidist.collectives import choice, layouts, ring
from minidist.ranks import environment, launch
from minidist.ranks.comm import run_threads
from tests.mpi import execute, need_mpi

RING = ("from minidist.collectives.ring import cut\nfrom minidist.cost import chunks\n"
        "import numpy as np\n")
GOOD = """
def reduce_scatter(chunks, comm, op=np.add):
    incoming = comm.scratch(max(chunk.size for chunk in chunks), chunks[0].dtype)
    for step in range(1, comm.size):
        mine = chunks[comm.rank - step - 1]
        op(mine, comm.shift(chunks[comm.rank - step], into=incoming[:mine.size]), out=mine)

def all_gather(chunks, comm):
    for step in range(comm.size - 1):
        comm.shift(chunks[comm.rank - step], into=chunks[comm.rank - step - 1])
"""


def lesson(main, ranks=2, argv=(), **names):
    """Run main(lesson) as if it were a module of its own."""
    main.__globals__.update(prove=names.pop("prove", main), EXERCISE=names.pop("exercise", []))
    try:
        return kit.run_on_threads([main], ranks, list(argv))
    finally:
        main.__globals__.update(prove=None, EXERCISE=[])


# ---- showing and proving

def test_rank_0_prints_once_and_rows_come_in_rank_order():
    def main(lesson):
        lesson.say("hello")
        lesson.rows(["squared"], [lesson.comm.rank ** 2])
    lines = lesson(main, 3)["output"].splitlines()
    assert lines.count("  hello") == 1
    at = lines.index("  rank  squared")
    assert [line.split() for line in lines[at + 1:at + 4]] == [["0", "0"], ["1", "1"], ["2", "4"]]


def test_a_check_fails_on_all_ranks_if_one_rank_is_off():
    seen = []

    def main(lesson):
        seen.append(lesson.check("close", 1e-3 * (lesson.comm.rank == 2), bound=1e-6))
    result = lesson(main, 3)
    assert seen == [False] * 3 and not result["ok"]
    message = "difference 1.0e-03 (bound 1.0e-06) on rank 2"
    assert result["checks"] == [dict(name="close", error=1e-3, bound=1e-6, ok=False,
                                     message=message)]
    assert "WRONG on rank 2" in result["output"] and "FAILED: close" in result["output"]


@pytest.mark.parametrize("error", [np.nan, np.inf, 1e-5])
def test_what_is_not_within_the_bound_is_wrong(error):
    assert not lesson(lambda lesson: lesson.check("x", error, 1e-6))["ok"]


def test_a_ledger_is_exact_on_every_rank():
    def main(lesson):
        lesson.ledger(("same", "n", 5, 5), ("own", "r", lesson.comm.rank, lesson.comm.rank),
                      n=5, r=lesson.comm.rank)
        lesson.ledger(("off", "n", 10, 10 + (lesson.comm.rank == 1)), n=10)
    result = lesson(main, 2)
    assert [row["ok"] for row in result["ledger"]] == [True, True, False]
    assert result["ledger"][2]["measured"] == 11 and not result["ok"]


def test_the_kit_s_own_messages_are_not_counted():
    def main(lesson):
        with lesson.comm.counting() as counted:
            lesson.rows(["x"], ["y"])
            lesson.check("x", 0)
        assert (counted.messages, counted.bytes) == (0, 0)
    assert lesson(main, 3)["ok"]


def test_json_is_json_whatever_failed(tmp_path):
    path = tmp_path / "result.json"
    result = lesson(lambda lesson: lesson.check("x", np.nan), 2, ["--json", str(path)])
    read = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert read["ok"] is False and read["checks"][0]["error"] is None
    assert set(read) >= {"lesson", "ranks", "seconds", "checks", "ledger", "ok"}
    assert {**result, "output": None} == {**read, "output": None}


def test_difference_is_relative_and_never_passes_by_shape():
    assert kit.difference([1.0, 2.0], [1.0, 4.0]) == 0.5
    assert kit.difference(np.zeros(3), np.zeros(4)) == np.inf
    assert kit.difference([], []) == 0 and kit.difference([0.0], [0.0]) == 0
    assert np.isnan(kit.difference([np.nan], [1.0]))


def test_figure_is_drawn_by_rank_0_into_out(tmp_path):
    def main(lesson):
        lesson.figure(lambda figure, x: figure.subplots().plot(x), [1, 2], name="p")
    lesson(main, 2, ["--out", str(tmp_path / "pictures")])
    assert [p.name for p in (tmp_path / "pictures").iterdir()] == ["p.png"]
    lesson(main, 2, ["--out", str(tmp_path / "none"), "--no-figure"])
    assert not (tmp_path / "none").exists()


def test_one_rank_runs_a_lesson_that_needs_no_more():
    def main(lesson):
        lesson.say("once")
        lesson.check("alone", lesson.comm.size - 1)
    main.__globals__["ALONE"] = True
    try:
        result = lesson(main, 3)
    finally:
        del main.__globals__["ALONE"]
    assert result["ok"] and result["ranks"] == 3 and result["output"].count("once") == 1


# ---- text

def test_tables_align_numbers_right_and_text_left():
    assert tables.table(["name", "n"], [["a", 5], ["long", 123]]) == [
        "name    n", "a       5", "long  123"]
    assert tables.table(["x"], [["36.9 kB"], ["1 MB"]]) == ["      x", "36.9 kB", "   1 MB"]


def test_fold_merges_equal_layers_only():
    rows = [("embed", 1), ("blocks.0.w", 2), ("blocks.1.w", 2), ("blocks.2.w", 3)]
    assert tables.fold(rows) == [("embed", 1), ("blocks.*.w  x2", 2), ("blocks.2.w", 3)]


def test_units():
    assert [kit.size(n) for n in (0, 999, 1000, 147456, 2.8e12, 5e15)] == [
        "0 bytes", "999 bytes", "1 kB", "147.5 kB", "2.8 TB", "5000 TB"]
    assert [kit.duration(t) for t in (2e-6, 1.5e-3, 2)] == ["2 us", "1.5 ms", "2 s"]


def test_code_is_quoted_without_decorator_and_docstring():
    @substitute.breaks(ring, "cut")
    def f(x):
        """Words."""
        y = x
        return y
    assert tables.code(f) == ["def f(x):", "    y = x", "    return y"]
    assert tables.code(f, "y = x", "y = x") == ["y = x"]


# ---- guessing

def guessed(argv, answer=6, unit="hops"):
    def main(lesson):
        lesson.predict("How many?", answer, unit, why="2(p-1)", mistakes={3: "once around only"})
    return lesson(main, 2, argv)


def test_predict_compares_the_reader_s_numbers_and_explains():
    assert "How many? 6 hops: 2(p-1)" in guessed([])["output"]
    for given, said in [("6", "right"), ("3", "once around only"), ("5", "2(p-1)")]:
        result = guessed(["--predict", given])
        assert f"you guessed {given} hops, it is 6 hops: {said}" in result["output"]
        assert result["guesses"] == [dict(question="How many?", unit="hops", guess=float(given),
                                          answer=6, ok=given == "6")]
    assert guessed([])["guesses"] == []


@pytest.mark.parametrize("text, unit, value", [
    ("1,000 MB", "GB", 1), ("1.5", "MB", 1.5), ("1500 kB", "MB", 1.5), ("2 GB.", "MB", 2000),
    ("six", "hops", 6), ("Twice", "times", 2), ("half", "", 0.5), ("3/4", "MB", 0.75),
    (".5", "", 0.5), ("about 40 times", "times", 40), ("0 %", "%", 0), ("nothing", "%", 0),
    ("3 million", "", 3e6), ("20 us", "ms", 0.02), ("1e9 bytes", "GB", 1), ("4x", "times", 4),
    ("12,345,678", "bytes", 12345678), ("-3", "", -3), ("a third", "", 1 / 3), ("", "MB", None),
    ("many", "", None), ("MB", "MB", None), ("no idea", "", None)])
def test_numbers_are_understood_as_people_write_them(text, unit, value):
    found = guess.number(text, unit)
    assert found is value is None or found == pytest.approx(value, rel=1e-12)


def test_predict_takes_numbers_with_units_from_the_command_line():
    argv = ["--predict", "1,000 MB; 6"]
    assert guessed(argv, 1, "GB")["guesses"][0]["ok"]
    with pytest.raises(BadInput, match="--predict takes numbers"):
        guessed(["--predict", "six?; MB"])


@pytest.mark.parametrize("argv", [["--predict"], ["--break", "mystery"]])
def test_where_nobody_can_type_it_is_said_before_anything_is_shown(argv, monkeypatch):
    monkeypatch.setattr(guess, "terminal", lambda: False)
    from lessons import ring as ring_lesson
    with pytest.raises(BadInput, match="no terminal reaches rank 0 here: start it with python -m "
                                       f"lessons.ring -n 2 {' '.join(argv)}"):
        kit.run_on_threads(ring_lesson.SCREENS, 2, argv)


def test_predict_reads_a_terminal(monkeypatch):
    monkeypatch.setenv("MINIDIST_TERMINAL", "1")
    for typed, said in [("3\n", "you guessed 3 hops"), ("what?\n6\n", "you guessed 6 hops"),
                        ("what?\nno idea\n", "How many? 6 hops"), ("\n", "How many? 6 hops")]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        assert said in guessed(["--predict"])["output"]


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks for mpirun in /proc")
@pytest.mark.parametrize("argv, typed, said", [
    (["--predict"], ["1,500 kB", "60 MB"], ["you guessed 1.5 MB, it is 1.5 MB: right"]),
    (["--break", "mystery"], ["send first"], ["your guess:", "It was "])])
def test_rank_0_asks_on_mpirun_s_terminal(argv, typed, said, tmp_path):
    """A student at a terminal types mpirun, and is asked: mpirun hands its input on to rank 0."""
    need_mpi()
    result = tmp_path / "result.json"
    command = launch.command(2, [sys.executable, "-m", "lessons.ring", "--no-figure", *argv,
                                 "--json", str(result)])
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, {**os.environ, **environment.SETTINGS})
    output, ended = b"", False
    os.write(terminal, "".join(line + "\n" for line in typed).encode())
    while not ended:
        try:
            new = os.read(terminal, 4096)
        except OSError:                                    # the terminal's other end is closed
            new = b""
        output, ended = output + new, not new
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, output.decode()
    assert all(text in output.decode() for text in said), output.decode()
    assert len(json.loads(result.read_text())["guesses"]) == len(typed)


def test_formulas_are_worked_out_as_on_paper():
    letters = dict(p=4, S=8000, B=2, T=3, D=5, L=2, V=7)
    for text, right in [("2(p-1)/p S", 12000), ("8 B T D (p-1)/p x 8", 1440), ("0", 0),
                        ("8 (12 L D^2 + 13 L D + (V+T+2) D)", 8 * (600 + 130 + 60)),
                        ("ceil(log2(p)) S", 16000), ("max(B, T) x 2", 6), ("2 P", 14)]:
        assert formula.value(text, dict(letters, P=7)) == right
    assert formula.used("2(p-1)/p S", letters) == ["p", "S"]


def test_a_formula_that_gives_another_number_is_wrong():
    def main(lesson):
        lesson.ledger(("bytes", "2(p-1) S", 16, 16), p=lesson.comm.size, S=8)
        lesson.ledger(("P  parameters", "n", None, 10), ("O  state", "2 P", None, 20), n=10)
        lesson.ledger(("bytes", "p S", 8, 8), p=lesson.comm.size, S=8)
    result = lesson(main, 2)
    assert [row["ok"] for row in result["ledger"]] == [True, True, True, False]
    assert "where p = 2, S = 8" in result["output"]


def test_screens_are_shown_in_order_with_title_and_words():
    def shown(lesson):
        """A title

        Words under it."""
        lesson.say("and more")
    lines = lesson(shown)["output"].splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("-- 1  A title --"))
    assert [line.strip() for line in lines[at + 1:at + 3]] == ["Words under it.", "and more"]


# ---- putting functions in place of others

def test_patched_reaches_names_tables_and_defaults_and_restores_them():
    namespace = sys.modules["minidist.collectives.ring"].__dict__
    old = ring.all_gather

    def default(f=old):
        return f
    namespace["table"], namespace["default"], namespace["alias"] = {"x": old}, default, old
    try:
        with substitute.patched((ring, "all_gather", len)):
            assert ring.all_gather is ring.alias is ring.table["x"] is ring.default() is len
        assert ring.all_gather is ring.alias is ring.table["x"] is ring.default() is old
    finally:
        for name in ("table", "default", "alias"):
            del namespace[name]


class Row(NamedTuple):
    name: str
    function: object


HOLDERS = {                                     # how a module can hold a function, and how it asks
    "a list": (lambda f: [f], lambda x: x[0]),
    "a tuple": (lambda f: (1, f), lambda x: x[1]),
    "tuples in a list": (lambda f: [("blocks.*", 0), ("head", f)], lambda x: x[1][1]),
    "nested dictionaries": (lambda f: {"a": {"b": [f]}}, lambda x: x["a"]["b"][0]),
    "a named tuple": (lambda f: Row("x", f), lambda x: x.function),
    "a partial of it": (lambda f: partial(f, [1]), lambda x: x.func),
    "a partial that is given it": (lambda f: partial(map, f), lambda x: x.args[0]),
    "a partial's keyword": (lambda f: partial(sorted, key=f), lambda x: x.keywords["key"]),
    "a keyword-only default": (lambda f: by_keyword(f), lambda x: x()),
    "a method's default": (lambda f: method(f), lambda x: x().call()),
    "a class's attribute": (lambda f: type("A", (), dict(f=[f], __module__="minidist.a")),
                            lambda x: x.f[0]),
}


def by_keyword(function):
    def default(*, f=function):
        return f
    return default


def method(function):
    class Thing:
        __module__ = "minidist.thing"

        def call(self, f=function):
            return f
    return Thing


@pytest.mark.parametrize("kind", HOLDERS)
def test_patched_reaches_what_a_module_holds_in(kind):
    make, ask = HOLDERS[kind]
    old, held = ring.all_gather, make(ring.all_gather)
    ring.held = held
    try:
        with substitute.patched((ring, "all_gather", len)):
            assert ask(ring.held) is len
        assert ring.held is held and ask(held) is old
    finally:
        del ring.held


def test_patched_reaches_the_plan_of_tensor_parallelism_and_the_algorithms():
    rows, rings = tp.head_rows, choice.ALGORITHMS["all_reduce"]["ring"]
    with substitute.patched((tp, "head_rows", len), (ring, "all_reduce", max)):
        assert [row[3] for row in tp.PLAN if row[1] == "attn.qkv"] == [len]
        assert choice.find("all_reduce", "ring", 8, 2) == ("ring", max)
    assert [row[3] for row in tp.PLAN if row[1] == "attn.qkv"] == [rows]
    assert choice.ALGORITHMS["all_reduce"]["ring"] is rings is ring.all_reduce


def test_what_holds_itself_is_walked_once():
    ring.held = [ring.all_gather]
    ring.held.append(ring.held)
    try:
        with substitute.patched((ring, "all_gather", len)):
            assert ring.held[0] is len
    finally:
        del ring.held


def test_nothing_worked_out_under_a_break_outlives_it():
    """And a break is not hidden by what was worked out before."""
    def layout():
        return layouts.layout((5,), 0, None, 2).lengths

    assert layout() == (3, 2)
    with substitute.patched((cost, "chunks", lambda n, p: [n // p] * p)):
        assert layout() == (2, 2)
    assert layout() == (3, 2)


def test_patched_methods_are_restored_after_an_error():
    class Thing:
        def f(self):
            return 1
    with pytest.raises(ZeroDivisionError), substitute.patched((Thing, "f", lambda self: 2)):
        assert Thing().f() == 2
        raise ZeroDivisionError
    assert Thing().f() == 1


# ---- breaks: found or not found

def value(x):
    return x


def broken_lesson(main, bug, **options):
    bug = substitute.breaks(sys.modules[__name__], "value", **options)(bug)
    main.__globals__["bug_of_this_test"] = bug
    try:
        return lesson(main, 2, ["--break", bug.title], prove=main)
    finally:
        del main.__globals__["bug_of_this_test"]


def test_a_bug_that_no_check_sees_fails_the_lesson():
    def harmless(x):
        """Nothing is wrong."""
        return x
    result = broken_lesson(lambda lesson: lesson.check("v", value(0)), harmless)
    assert not result["ok"] and "NOT CAUGHT" in result["output"]


def test_a_bug_is_caught_by_a_check_an_exception_or_a_deadlock():
    def wrong(x):
        """Off by one."""
        return x + 1

    def raises(x):
        """Divides by zero."""
        return x / 0

    def prove(lesson):
        lesson.check("v", value(0))
    assert broken_lesson(prove, wrong)["ok"]
    assert "ZeroDivisionError" in broken_lesson(prove, raises)["output"]

    def stuck(x):
        """Receives first."""
        x.recv(np.empty(1), 1 - x.rank)
        return 0
    result = broken_lesson(lambda lesson: lesson.check("v", value(lesson.comm) is None), stuck)
    assert result["ok"] and "deadlock" in result["output"]


def test_a_bug_that_buffered_sends_hide_is_shown_twice():
    def send_first(x):
        """Sends first."""
        into = np.empty(1)
        x.send(np.zeros(1), 1 - x.rank)
        return x.recv(into, 1 - x.rank)[0]
    result = broken_lesson(lambda lesson: lesson.check("v", value(lesson.comm)), send_first,
                           sync=True)
    assert result["ok"] and "every check passes" in result["output"]
    assert "deadlock" in result["output"]


def test_list_and_mystery(monkeypatch):
    from lessons import ring as ring_lesson
    listed = kit.run_on_threads(ring_lesson.SCREENS, 2, ["--break", "list"])["output"]
    assert "off-by-one" in listed and "send-first" in listed
    monkeypatch.setenv("MINIDIST_TERMINAL", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO("send first\n"))
    monkeypatch.setattr(random, "choice", lambda names: names[0])
    mystery = kit.run_on_threads(ring_lesson.SCREENS, 2, ["--break", "mystery"])
    hidden = mystery["output"].partition("Which one")[0]
    assert mystery["ok"] and "def " not in hidden and "send_first" not in hidden
    assert "It was send-first" in mystery["output"]
    assert mystery["guesses"] == [dict(question="which break?", unit="", guess="send-first",
                                       answer="send-first", ok=True)]


# ---- a reader's file

def graded(text, tmp_path, ranks=1):
    from lessons import ring as ring_lesson
    mine = tmp_path / "mine.py"
    mine.write_text(RING + text)
    return kit.run_on_threads(ring_lesson.SCREENS, ranks, ["--mine", str(mine)])


def test_right_values_with_too_many_bytes_fail(tmp_path):
    result = graded(GOOD + """
def all_reduce(x, comm, op=np.add):
    total = x.copy()
    for other in range(1, comm.size):
        to, source = (comm.rank + other) % comm.size, (comm.rank - other) % comm.size
        op(total, comm.sendrecv(x, to, np.empty_like(x), source), out=total)
    x[...] = total
""", tmp_path)
    assert not result["ok"] and "messages of a rank" in result["output"]
    assert all(check["ok"] or "messages sent" in check["message"] for check in result["checks"])


def test_a_hang_becomes_a_report(tmp_path):
    result = graded(GOOD + """
def all_reduce(x, comm, op=np.add):
    if comm.size > 1:
        comm.recv(np.empty_like(x), (comm.rank - 1) % comm.size)
""", tmp_path)
    assert not result["ok"] and "deadlock" in result["output"]


def test_a_hang_that_buffered_sends_would_hide_is_found(tmp_path):
    result = graded(GOOD + """
def all_reduce(x, comm, op=np.add):
    pieces = cut(x, chunks(x.size, comm.size))
    for step in range(1, comm.size):
        mine = pieces[comm.rank - step - 1]
        comm.send(pieces[comm.rank - step], (comm.rank + 1) % comm.size)
        op(mine, comm.recv(np.empty_like(mine), (comm.rank - 1) % comm.size), out=mine)
    all_gather(pieces, comm)
""", tmp_path)
    assert not result["ok"] and "all send first" in result["output"]


def test_a_proof_that_checks_nothing_proves_nothing():
    assert not substitute.Outcome().ok
    check = dict(name="x", error=0.0, bound=0.0, ok=True)
    assert substitute.Outcome([check]).ok and not substitute.Outcome([check], error="raised").ok


def test_an_exception_names_file_line_and_function(tmp_path):
    result = graded(GOOD + "\ndef all_reduce(x, comm, op=np.add):\n    x[10 ** 9] = 0\n", tmp_path)
    assert not result["ok"] and "mine.py, line" in result["output"]
    assert "in all_reduce: IndexError" in result["output"]


@pytest.mark.parametrize("text, message", [
    (GOOD, "does not define all_reduce"),
    ("def all_reduce(x, comm:\n", "line 4"),
    ("import no_such_module\n", "No module named"),
    ("exit(0)\n", "line 4, in <module>: SystemExit"),
])
def test_a_file_that_cannot_be_used_is_refused(text, message, tmp_path):
    with pytest.raises(BadInput, match=message):
        graded(text, tmp_path)


def test_leaving_is_no_success(tmp_path):
    result = graded(GOOD + "\ndef all_reduce(x, comm, op=np.add):\n    exit(0)\n", tmp_path)
    assert not result["ok"] and "SystemExit" in result["output"]


def test_functions_are_the_module_s_again_afterwards(tmp_path):
    before = ring.all_reduce
    graded(GOOD + "\ndef all_reduce(x, comm, op=np.add):\n    pass\n", tmp_path)
    assert ring.all_reduce is before


# ---- the command line

@pytest.mark.parametrize("argv, message", [
    (["--break", "nothing"], "no break named 'nothing'"),
    (["--color"], "--color"),
    (["--predict", "some"], "--predict takes numbers"),
    (["--mine", "no_such_file.py"], "is not a file"),
    (["--stub", __file__], "exists already"),
    (["--stub", "/proc/none/mine.py"], "cannot write /proc/none/mine.py"),
    (["--json", "/proc/none/result.json"], "cannot write"),
    (["--out", __file__], "cannot write"),
])
def test_bad_input_is_one_sentence(argv, message):
    from lessons import ring as ring_lesson
    with pytest.raises(BadInput, match=message) as error:
        kit.run_on_threads(ring_lesson.SCREENS, 2, argv)
    assert "\n" not in str(error.value)


def test_bad_input_ends_the_job_with_status_2_and_one_line():
    need_mpi()
    status, output = execute([sys.executable, "-m", "lessons.ring", "-n", "2", "--break", "no"])
    assert status == 2 and output.strip().count("\n") == 0 and output.startswith("error: ")


def test_a_wrong_solution_ends_the_job_with_status_1(tmp_path):
    need_mpi()
    mine, result = tmp_path / "mine.py", tmp_path / "result.json"
    mine.write_text(RING + GOOD + "\ndef all_reduce(x, comm, op=np.add):\n    pass\n")
    status, output = execute([sys.executable, "-m", "lessons.ring", "-n", "2", "--mine", str(mine),
                              "--json", str(result)])
    assert status == 1 and "FAILED" in output and not json.loads(result.read_text())["ok"]


def test_the_list_of_lessons():
    status, output = execute([sys.executable, "-m", "lessons"])
    assert status == 0
    names = [name for name, _, _ in existing()]
    places = [output.index(f"  {name} ") for name in names]
    assert places == sorted(places) and names == [n for n in ORDER if n in names]
    assert all(question in output for _, _, question in existing())


def test_threads_of_threads():
    def rank(comm):
        return sum(run_threads(2, lambda inner: inner.rank))
    assert run_threads(2, rank) == [1, 1]
