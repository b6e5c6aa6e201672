"""Schedules: their orders against closed forms, and the checks against schedules that are wrong."""
from dataclasses import replace

import pytest

from minidist import BadInput, schedules
from minidist.schedules import ORDERS, Walk, check, make

SIZES = [(p, m) for p in range(1, 6) for m in sorted({1, max(1, p - 1), p, 2 * p, 2 * p + 1, 11})]
MADE = [(name, p, m, v) for name, order in ORDERS.items() for p, m in SIZES
        for v in order.chunks[:3]]

# How many actions ahead of need a receive must be posted, if every send waits for its receive.
AHEAD = {"naive": 0, "gpipe": 0, "1f1b": 1, "zb-h1": 1, "interleaved": 2}


def spelled(actions):
    """'F0 F1 B0 ...'; the chunk behind a dot, where it is not 0."""
    return " ".join(f"{kind}{i}" + (f".{c}" if c else "") for kind, i, c in actions)


@pytest.mark.parametrize("name, p, m, rank, text", [
    ("naive", 3, 3, 1, "F0 B0 F1 B1 F2 B2"),
    ("gpipe", 3, 3, 1, "F0 F1 F2 B0 B1 B2"),
    ("1f1b", 4, 6, 0, "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"),
    ("1f1b", 4, 6, 2, "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5"),
    ("1f1b", 4, 6, 3, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"),
    ("1f1b", 4, 2, 0, "F0 F1 B0 B1"),                     # fewer micro-batches than stages
    ("interleaved", 2, 2, 0, "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"),
    ("interleaved", 2, 4, 1, "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3"),
    ("zb-h1", 3, 4, 0, "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"),
    ("zb-h1", 3, 4, 2, "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"),
    ("zb-v", 2, 3, 0, "F0 F1 F2 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 I0 W0 F2.1 I2.1 W2.1 "
                      "I1 W1 I2 W2"),
    ("zb-v", 2, 3, 1, "F0 F0.1 F1 F1.1 I0.1 W0.1 F2 I0 W0 F2.1 I1.1 W1.1 I1 I2.1 I2 W1 W2.1 W2"),
])
def test_orders_by_hand(name, p, m, rank, text):
    assert spelled(make(name, p, m).actions[rank]) == text


@pytest.mark.parametrize("p, m", SIZES)
def test_one_f_one_b_is_the_order_that_pytorch_writes_down(p, m):
    """One forward more in the warm-up, then backward before forward."""
    for rank in range(p):
        w = min(m, p - rank)
        text = [("F", i, 0) for i in range(w)]
        for i in range(m - w):
            text += [("B", i, 0), ("F", w + i, 0)]
        text += [("B", i, 0) for i in range(m - w, m)]
        assert make("1f1b", p, m).actions[rank] == text


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_is_megatron_s_table(p, v):
    """Virtual micro-batch k: chunk (k mod pv) / p, forward; counted from the end, backward."""
    m = 3 * p
    for rank in range(p):
        def virtual(kind, k, v=v):
            chunk = k % (p * v) // p
            return kind, k // (p * v) * p + k % p, chunk if kind == "F" else v - 1 - chunk
        w = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)
        text = [virtual("F", k) for k in range(w)]
        for k in range(m * v - w):
            text += [virtual("F", w + k), virtual("B", k)]
        text += [virtual("B", k) for k in range(m * v - w, m * v)]
        assert make("interleaved", p, m, v).actions[rank] == text


@pytest.mark.parametrize("p, m", [(p, m) for p in (1, 2, 3, 4, 5) for m in (2 * p, 2 * p + 3)])
def test_dualpipe_v_is_the_closed_form(p, m):
    """The eight phases of dualpipe.py, with r as its q, p as its half."""
    for r, actions in enumerate(make("dualpipe-v", p, m).actions):
        kinds = ["F0"] * (2 * (p - r - 1)) + ["F0", "F1"] * (r + 1)
        kinds += ["I1", "W", "F1"] * (p - r - 1)
        kinds += ["F0", "B1", "F1", "B0"] * (m - 2 * p + r + 1) + ["B1", "F1", "B0"] * (p - r - 1)
        for k in range(r + 1):
            late = k >= (r + 1) // 2                        # from its B1 on if r is odd, else B0
            kinds += ["I1" if late and (r % 2 or k > (r + 1) // 2) else "B1"]
            kinds += ["I0" if late else "B0"]
        kinds += ["W", "I0"] * (p - r - 1) + ["W"] * (r + 1)
        assert [a if a == "W" else f"{a}{c}" for a, _, c in actions] == kinds
        for c in (0, 1):
            assert [i for a, i, d in actions if (a, d) == ("F", c)] == list(range(m))
            assert [i for a, i, d in actions if a in "BI" and d == c] == list(range(m))
        halves = [(i, c) for a, i, c in actions if a == "I"]
        assert [(i, c) for a, i, c in actions if a == "W"] == halves


@pytest.mark.parametrize("name, p, m, v", MADE)
def test_every_schedule_is_complete_ordered_and_matched(name, p, m, v):
    check(make(name, p, m, v))


@pytest.mark.parametrize("name, p, m, v", [x for x in MADE if x[0] in AHEAD
                                           and (x[0] != "interleaved" or x[2] % x[1] == 0)])
def test_sends_may_wait_for_their_receives(name, p, m, v):
    check(make(name, p, m, v), AHEAD[name])


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v"])
def test_but_not_without_receives_that_are_posted_early(name):
    with pytest.raises(ValueError, match=r"deadlocks: rank 0 waits to send .* to rank 1; "
                                         r"rank 1 waits to send .* to rank 0$"):
        check(make(name, 2, 8), AHEAD.get(name, 1) - 1)


def test_stages_are_dealt_in_turn_or_there_and_back():
    looped, folded = make("interleaved", 4, 4, 3), make("zb-v", 4, 4)
    assert [[looped.stage(r, c) for r in range(4)] for c in range(3)] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [[folded.stage(r, c) for r in range(4)] for c in range(2)] == [
        [0, 1, 2, 3], [7, 6, 5, 4]]
    for s in (looped, folded):
        assert all(s.stage(*s.home(stage)) == stage for stage in range(s.stages))
    assert folded.neighbours(3, ("F", 0, 0)) == [2, 4] and folded.neighbours(0, ("I", 0, 1)) == [
        None, 6] and folded.neighbours(0, ("W", 0, 0)) == [None, None]


def test_a_walk_takes_every_action_once_and_in_order():
    s = make("zb-v", 3, 5)
    order = list(Walk(s))
    assert [[a for r, a in order if r == rank] for rank in range(3)] == s.actions


def test_borders_see_the_same_micro_batches_from_both_sides():
    found = schedules.borders(make("interleaved", 2, 3, 2))
    assert set(found) == {("F", 0, 1), ("F", 1, 2), ("F", 2, 3),
                          ("B", 3, 2), ("B", 2, 1), ("B", 1, 0)}
    assert all(sent == received == [0, 1, 2] for sent, received in found.values())


# ------------------------------------------------------------------ wrong schedules are found

def edited(name, p, m, rank, edit):
    """A schedule with one rank's list changed in place."""
    s = make(name, p, m)
    actions = [list(a) for a in s.actions]
    edit(actions[rank])
    return replace(s, actions=actions)


def swap(a, b):
    def edit(actions):
        actions[a], actions[b] = actions[b], actions[a]
    return edit


def early_w(actions):
    actions.remove(("W", 0, 0))
    actions.insert(1, ("W", 0, 0))


@pytest.mark.parametrize("name, rank, edit, message", [
    ("1f1b", 0, swap(0, -1), "rank 0 does B of micro-batch 3, chunk 0, after nothing"),
    ("1f1b", 1, lambda a: a.append(("B", 0, 0)), "does B of micro-batch 0, chunk 0, after F B"),
    ("1f1b", 1, lambda a: a.remove(("B", 2, 0)), "never finishes micro-batch 2"),
    ("1f1b", 1, lambda a: a.append(("F", 4, 0)), "works on micro-batch 4, chunk 0, of 4"),
    ("1f1b", 1, lambda a: a.extend([("F", 0, 1), ("B", 0, 1)]), "micro-batch 0, chunk 1, of 4"),
    ("zb-h1", 0, lambda a: a.remove(("W", 1, 0)), "never finishes micro-batch 1"),
    ("zb-h1", 0, lambda a: a.append(("W", 1, 0)), "does W of micro-batch 1, chunk 0, after F I"),
    ("zb-h1", 1, early_w, "rank 1 does W of micro-batch 0, chunk 0, after F"),
    ("gpipe", 0, swap(0, 1), r"stage 0 sends its F in the order \[1, 0, 2, 3\], stage 1 rec"),
])
def test_what_is_wrong_is_named(name, rank, edit, message):
    with pytest.raises(ValueError, match=message):
        check(edited(name, 2, 4, rank, edit))


def test_orders_that_match_may_still_wait_for_each_other():
    """Rank 1 wants micro-batch 1 back before it has sent on micro-batch 0."""
    both = make("1f1b", 2, 2)
    wrong = replace(both, actions=[[("F", 0, 0), ("B", 0, 0), ("F", 1, 0), ("B", 1, 0)],
                                   [("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0)]])
    with pytest.raises(ValueError, match="rank 0 waits to receive for B 0 0 from rank 1; "
                                         "rank 1 waits to receive for F 1 0 from rank 0"):
        check(wrong)


@pytest.mark.parametrize("request_, message", [
    (("zero", 2, 2), "there is no schedule 'zero'; use one of naive, gpipe, 1f1b"),
    (("1f1b", 2, 2, 2), "1f1b works on 1 chunk per rank, not 2; use --chunks 1"),
    (("interleaved", 2, 2, 1), "interleaved works on 2 chunks or more per rank, not 1"),
    (("zb-v", 2, 2, 3), "zb-v works on 2 chunks per rank, not 3"),
    (("1f1b", 2, 0), "at least 1 rank and 1 micro-batch, not 2 and 0"),
])
def test_what_cannot_be_made_is_refused(request_, message):
    with pytest.raises(BadInput, match=message):
        make(*request_)
