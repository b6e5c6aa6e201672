"""The exercises of lessons.pp and lessons.schedules: plausible mistakes, each found by the proof."""
import pytest

from tests.test_lessons import run, solution

MUTANTS = {
    ("pp", "one_f_one_b"): [("p - rank - 1", "p - rank"), ("p - rank - 1", "rank"),
                            ('yield "B", i\n', 'yield "B", warmup + i\n'),
                            ('"F", warmup + i', '"F", i'),
                            ("range(m - warmup, m))", "range(m - warmup, m - 1))"),
                            ("min(p - rank - 1, m)", "m")],
    ("pp", "act"): [("run.late[i, chunk] = []", "pass"),
                    ("run_deferred(run.late.pop((i, chunk)))", "run.late.pop((i, chunk)) and None"),
                    ("run.late.pop((i, chunk))", "run.late[i, chunk]"),
                    ("return run.backward(", "run.backward("),
                    ("return run.forward(i, chunk, x)", "return run.forward(i, chunk, None)"),
                    ("run.late.get((i, chunk))", "None"),
                    ("chunk, x, run.late", "chunk, None, run.late")],
    ("schedules", "interleaved"): [("v - 1 - c", "c"), ("2 * (p - rank - 1)", "(p - rank - 1)"),
                                   ("(v - 1) *", "v *"), ("max(1, m // p)", "1"),
                                   ("if k >= warmup", "if k > warmup"), ("m * v + warmup", "m * v"),
                                   ("for c in range(v) for i in some", "for i in some for c in "
                                                                       "range(v)")],
    ("schedules", "zb_h1"): [("i - late >= rank", "i - late > rank"), (">= rank", ">= 0"),
                             ("late += 1", "pass"), ("range(late, m)", "range(late + 1, m)"),
                             ('"I" if kind == "B" else kind', "kind"),
                             ('yield "W", late', 'yield "W", i'), (">= rank", ">= m")],
}


@pytest.mark.parametrize("name, function, k", [(*key, k) for key, found in MUTANTS.items()
                                               for k in range(len(found))])
def test_the_proof_finds_it(name, function, k, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(solution(name, function, MUTANTS[name, function][k]))
    result = run(name, 1, "--mine", str(mine))
    assert not result["ok"] and "FAILED" in result["output"]
