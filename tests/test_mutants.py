"""Plausible mistakes in the functions that readers write: each must fail in the lesson's proof."""
import pytest

from lessons import exercises
from tests.test_lessons import run, solution

MUTANTS = {
    ("flash", "merge"): [
        ("lse[...] = np.logaddexp(lse, lse_new)", "pass"),                    # lse not carried on
        ("np.logaddexp(lse, lse_new)", "np.maximum(lse, lse_new)"),
        ("np.exp(-np.logaddexp(0, -ahead))", "0.5 + 0 * ahead"),               # by number of tiles
        ("np.logaddexp(0, -ahead)", "np.logaddexp(0, ahead)"),                # the old one's share
        ("np.exp(-np.logaddexp(0, -ahead))", "np.exp(ahead) / (1 + np.exp(ahead))"),   # overflows
        ("np.maximum(lse, np.finfo(lse.dtype).min)", "lse"),                  # -inf - -inf
        ("out_new - out", "out_new"),                                         # old one not rescaled
        ("out += out_new", "out = out + out_new"),                            # not in place
    ],
    ("recompute", "checkpoint"): [
        ("again(fn, *inputs).node", "fn(*inputs).node"),                      # not as a repetition
        ("rewound(rng, state)", "rewound(None, state)"),
        ("cut_off(arg) for arg", "arg for arg"),                              # the graph goes on
        ("origin.get(leaf, leaf) for", "leaf for"),                           # gradients of inputs
        ("gradients(root, g)", "gradients(root, 2 * g)"),
        ("Tensor(y.data, parents, vjp)", "y"),                                # nothing forgotten
        ("for leaf in leaves]\n\n    def", "for leaf in leaves[:1]]\n\n    def"),
        ("Tensor(y.data, parents, vjp)", "Tensor(2 * y.data, parents, vjp)"),
    ],
    ("zero", "attach"): [
        ("p.grad[:piece.size]", "2 * p.grad[:piece.size]"),
        ("[flat.mine]", "[:flat.size]"),                                      # the first rank's
        ("[flat.mine]", "[flat.mine].copy()"),                                # nothing is written
        ("append(model.gather_all)", "append(lambda: None)"),
        ("optimizer.target = target", "pass"),
        ("return p.data, p.grad", "return p.data, None"),                     # stage 3 stands still
        ("return p.data, p.grad", "return p.data, 2 * p.grad"),
    ],
    ("zero", "gather_updated"): [
        ("[p.data for p in params]", "[p.data + 0 for p in params]"),
        ("p.sliced[key].mine", "p.sliced[key].mine.start:"),                  # more than my piece
        (".mine] for", ".mine] * 2 for"),
        ("buckets.gather(mine,", "(mine,"),                                   # never sent
        ("buckets.gather(mine,", "buckets.gather(mine[::-1],"),
        ("p.data.reshape(-1)[", "p.data.reshape(-1).copy()[0:0] * p.data.reshape(-1)["),
        ("p.sliced[key].mine", "0:p.sliced[key].size"),                       # the first rank's
    ],
    ("zero", "keep_sum"): [
        ("sums[p.name] + p.grad if", "p.grad if"),                            # the last pass
        ("sums[p.name] + p.grad if", "sums[p.name] if"),                      # the first pass
        ("sums[p.name] + p.grad if", "(sums[p.name] + p.grad) / 2 if"),
        ("sums[p.name] + p.grad if", "sums[p.name] - p.grad if"),
        ("bucket.hand_out(row)", "bucket.hand_out()"),                        # before the sum
        ("bucket.hand_out(row)", "pass"),
        ("p.grad = None", "pass"),
    ],
    ("zero", "send_for"): [
        ("[pieces[p.name] for", "[2 * pieces[p.name] for"),
        ("[pieces[p.name] for", "[0 * pieces[p.name] for"),
        ("p.placements[key].shape", "p.data.shape"),                          # a piece, not a whole
        ("p.placements[key].shape", "p.placements[key].shape[::-1]"),
        ("p.dtype == dtype]", "p.dtype == dtype][1:]"),
        ("return sent", "return []"),
        ("gather, mine, wholes", "gather, mine[::-1], wholes"),
    ],
    ("zero", "free"): [
        ("p.data = pieces[p.name]", "pass"),
        ("p.data = pieces[p.name]", "p.data = pieces[p.name].copy()"),        # updates are lost
        ("p.data = pieces[p.name]", "p.data = 0 * pieces[p.name]"),
        ("in params:", "in params[1:]:"),
        ("in params:", "in params[:1]:"),
        ("p.data = pieces[p.name]", "p.data[:] = 0"),
        ("p.data = pieces[p.name]", "p.data = p.data.reshape(-1)[:pieces[p.name].size]"),
    ],
    ("cp", "forward"): [
        ("sights[comm.rank - step]", "sights[comm.rank]"),
        ("sights[comm.rank - step]", "sights[comm.rank + step - comm.size]"),  # other direction
        ("step < comm.size - 1", "step < comm.size"),                         # one hop too many
        ("arrive() if arrive else None", "kv"),                               # never takes the next
        ("flash.attend(q, *kv,", "flash.attend(q, kv[1], kv[0],"),
        ("range(comm.size)", "range(max(1, comm.size - 1))"),                 # misses one block
        ("flash.nothing(q)", "(np.zeros_like(q), np.zeros(q.shape[:2]))"),    # a key of score 0
    ],
    ("cp", "backward"): [
        ("sights[comm.rank - step]", "sights[comm.rank]"),
        ("home + gathered()", "home"),                                        # last gradient lost
        ("gkv + gathered() if gathered else gkv", "gkv"),                     # not added up
        ("np.zeros_like(kv) if step else home", "np.zeros_like(kv)"),         # own gradient lost
        ("np.zeros_like(kv) if step else home", "home"),                      # all in one array
        ("arrive() if arrive else None", "kv"),                               # stale keys
        ("step < comm.size - 1", "step < comm.size"),                         # one hop too many
        ("np.zeros_like(q[..., :-1])", "q[..., :-1].copy()"),
    ],
    ("ulysses", "to_heads"): [
        ("apart=HEADS, together=TOKENS", "apart=TOKENS, together=HEADS"),
        ("apart=HEADS, together=TOKENS", "apart=HEADS, together=HEADS"),
        ("apart=HEADS, together=TOKENS", "apart=TOKENS, together=TOKENS"),
        ("apart=HEADS, together=TOKENS", "apart=3, together=TOKENS"),
        ("all_to_all(x,", "all_to_all(Tensor(x.data),"),                      # off the tape
        ("all_to_all(x,", "all_to_all(x * 2.0,"),
    ],
    ("ulysses", "to_tokens"): [
        ("apart=TOKENS, together=HEADS", "apart=HEADS, together=TOKENS"),
        ("apart=TOKENS, together=HEADS", "apart=TOKENS, together=TOKENS"),
        ("apart=TOKENS, together=HEADS", "apart=HEADS, together=HEADS"),
        ("apart=TOKENS, together=HEADS", "apart=TOKENS, together=3"),
        ("all_to_all(x,", "all_to_all(Tensor(x.data),"),
        ("all_to_all(x,", "all_to_all(x * 2.0,"),
    ],
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
                             ('yield "W", late', 'yield "W", i'), (">= rank", ">= m")]}
CASES = [(*which, text) for which, texts in MUTANTS.items() for text in texts]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("lesson, function, text", CASES)
def test_a_mutant_fails(lesson, function, text, tmp_path, monkeypatch):
    monkeypatch.setattr(exercises, "SIZES", {2, 3})            # on one rank many are right
    mine = tmp_path / "mine.py"
    mine.write_text(solution(lesson, function, text))
    result = run(lesson, 1, "--mine", str(mine))
    assert not result["ok"] and "FAILED" in result["output"]
