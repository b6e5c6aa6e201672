"""Pipeline schedules: what every rank does, in which order, as plain lists of actions.

    ("F", i, c)   forward of micro-batch i through chunk c of this rank's layers
    ("B", i, c)   its backward; or, cut in two halves:
    ("I", i, c)       gradient of the input, for which the stage before waits
    ("W", i, c)       gradients of the weights, for which nobody waits

Four ranks, four micro-batches, backward twice as long as forward; the dots are the bubble:

    gpipe    rank 0   F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 -- B1 -- B2 -- B3 --
             rank 3   .  .  .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .  .  .  .  .
    1f1b     rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B0 -- .  B1 -- .  B2 -- .  B3 --
             rank 3   .  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .  .  .

The layers are cut into stages, v chunks of them on each of p ranks. Chunks are dealt in turn
(rank 0 has stages 0, p, 2p ...), or, for schedules whose name ends in v, there and back:

    dealt   rank 0 1 2 3        folded   rank 0 1 2 3
    chunk 0      0 1 2 3                      0 1 2 3
    chunk 1      4 5 6 7                      7 6 5 4

Nothing here runs: minidist.pp does that, minidist.simulate costs and draws.

Lesson: python -m lessons.schedules
Paper:  Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, interleaved);
        Qi et al. 2023, "Zero bubble pipeline parallelism"; DeepSeek-AI 2024 (DualPipe)
"""
from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from minidist import BadInput

# === The orders of one rank ===
#
# (rank, p ranks, m micro-batches) -> actions; without a chunk, chunk 0 is meant.

def naive(rank, p, m):
    """Take one micro-batch through all stages and back before the next one starts."""
    for i in range(m):
        yield "F", i
        yield "B", i


def gpipe(rank, p, m):
    """All forwards, then all backwards: m activations are alive at once."""
    yield from (("F", i) for i in range(m))
    yield from (("B", i) for i in range(m))


def one_f_one_b(rank, p, m):
    """Start backward as early as possible, so that at most p - rank activations are alive."""
    warmup = min(p - rank - 1, m)
    yield from (("F", i) for i in range(warmup))
    for i in range(m - warmup):
        yield "F", warmup + i
        yield "B", i
    yield from (("B", i) for i in range(m - warmup, m))


def interleaved(rank, p, m, v):
    """1F1B over v chunks: a round of micro-batches through chunk 0, then chunk 1, and so on.

    A round is p micro-batches, or a few more where p does not divide m.  At the start a rank
    waits for p - 1 chunks rather than p - 1 whole stages: bubble / v."""
    rounds = np.array_split(range(m), max(1, m // p))
    order = [(int(i), c) for some in rounds for c in range(v) for i in some]
    warmup = min(2 * (p - rank - 1) + (v - 1) * len(rounds[0]), m * v)
    for k in range(m * v + warmup):
        if k < m * v:
            yield "F", *order[k]
        if k >= warmup:
            i, c = order[k - warmup]
            yield "B", i, v - 1 - c


def zb_h1(rank, p, m):
    """1F1B with backward in two halves: W waits until `rank` more I's are done, and fills gaps."""
    late = 0
    for kind, i in one_f_one_b(rank, p, m):
        yield ("I" if kind == "B" else kind), i
        if kind == "B" and i - late >= rank:
            yield "W", late
            late += 1
    yield from (("W", i) for i in range(late, m))


def zb_v(rank, p, m):
    """Two folded chunks: the rank that starts first also ends first.  No bubble if F = I = W

    The order is that of at least 2p - 1 micro-batches, less those that do not exist."""
    n, r = max(m, 2 * p - 1), rank
    return numbered(m, [(2 * (p - r) - 1, "F0"), (r, "F1 F0"), (p - r, "F1 I1 W"),
                        (n - 2 * p + r + 1, "F0 I0 W F1 I1 W"), (p - r - 1, "I0 W F1 I1 W"),
                        (r, "I0 I1"), (p - r, "I0 W"), (2 * r, "W")])


def dualpipe_v(rank, p, m):
    """Two folded chunks: forwards of one beside backwards of the other, which GPUs can overlap.

    The order is that of at least 2p micro-batches, less those that do not exist."""
    n, r = max(m, 2 * p), rank
    return numbered(m, [(2 * (p - r - 1), "F0"), (r + 1, "F0 F1"), (p - r - 1, "I1 W F1"),
                        (n - 2 * p + r + 1, "F0 B1 F1 B0"), (p - r - 1, "B1 F1 B0"),
                        ((r + 1) // 2, "B1 B0"), ((r + 1) % 2, "B1 I0"), ((r + 1) // 2, "I1 I0"),
                        (p - r - 1, "W I0"), (r + 1, "W")])


def numbered(m, phases):
    """Spell out phases: (2, "F0 F1") is F 0 0, F 0 1, F 1 0, F 1 1.  W takes the oldest I"""
    following, late = Counter(), deque()
    for times, passes in phases:
        for kind, *chunk in times * passes.split():
            if kind == "W":
                i, c = late.popleft()
            else:
                c = int(*chunk)
                i = following[kind == "F", c]
                following[kind == "F", c] += 1
            if kind == "I":
                late.append((i, c))
            if i < m:
                yield kind, i, c


# === Schedules ===

class Order(NamedTuple):
    """How a schedule's lists are made, and for how many chunks on each rank."""
    make: object                                            # one of the functions above
    chunks: range = range(1, 2)
    folded: bool = False


ORDERS = {"naive": Order(naive), "gpipe": Order(gpipe), "1f1b": Order(one_f_one_b),
          "interleaved": Order(interleaved, range(2, 1000)), "zb-h1": Order(zb_h1),
          "zb-v": Order(zb_v, range(2, 3), folded=True),
          "dualpipe-v": Order(dualpipe_v, range(2, 3), folded=True)}


@dataclass(frozen=True)
class Schedule:
    """What each of p ranks does with m micro-batches and v chunks of the layers."""
    name: str
    p: int
    m: int
    v: int
    folded: bool
    actions: list                                           # [rank] -> [(kind, i, chunk)]

    @property
    def stages(self):
        return self.p * self.v

    def stage(self, rank, chunk):
        """Say which stage a rank's chunk is."""
        return chunk * self.p + (self.p - 1 - rank if self.folded and chunk % 2 else rank)

    def home(self, stage):
        """Say where a stage is.  -> (rank, chunk)"""
        chunk, place = divmod(stage, self.p)
        return self.p - 1 - place if self.folded and chunk % 2 else place, chunk

    def neighbours(self, rank, action):
        """Name the stages that an action's input comes from and its result goes to, or None."""
        kind, _, chunk = action
        s = self.stage(rank, chunk)
        pair = {"F": (s - 1, s + 1), "W": (-1, -1)}.get(kind, (s + 1, s - 1))
        return [t if 0 <= t < self.stages else None for t in pair]


def make(name, p, m, v=None):
    """Make a schedule by name; v chunks per rank, None: as few as it allows."""
    if name not in ORDERS:
        raise BadInput(f"there is no schedule {name!r}; use one of {', '.join(ORDERS)}")
    order = ORDERS[name]
    v = order.chunks[0] if v is None else v
    if p < 1 or m < 1:
        raise BadInput(f"a schedule needs at least 1 rank and 1 micro-batch, not {p} and {m}")
    if v not in order.chunks:
        allowed = {1: "1 chunk", 2: "2 chunks"}[order.chunks[0]]
        allowed += " or more" if len(order.chunks) > 1 else ""
        raise BadInput(f"{name} works on {allowed} per rank, not {v}; "
                       f"use --chunks {order.chunks[0]}")
    sizes = (p, m, v) if order.make is interleaved else (p, m)
    actions = [[(*action, 0)[:3] for action in order.make(rank, *sizes)] for rank in range(p)]
    return Schedule(name, p, m, v, order.folded, actions)


# === Checks ===

def check(schedule, ahead=None):
    """Raise ValueError where a schedule is not complete, ordered, matched and free of deadlock.

    ahead: see Walk."""
    for rank, actions in enumerate(schedule.actions):
        check_rank(schedule, rank, actions)
    for (kind, here, there), (sent, received) in borders(schedule).items():
        if sent != received:
            raise ValueError(f"{schedule.name}: stage {here} sends its {kind} in the order {sent}, "
                             f"stage {there} receives them as {received}")
    for _ in Walk(schedule, ahead):
        pass


def check_rank(schedule, rank, actions):
    """Demand that each pass is done once, a backward after its forward, a W after its I."""
    seen = {}
    for kind, i, chunk in actions:
        before = seen.get((i, chunk), "")
        if kind not in {"": "F", "F": "BI", "FI": "W"}.get(before, ""):
            raise ValueError(f"{schedule.name}: rank {rank} does {kind} of micro-batch {i}, chunk "
                             f"{chunk}, after {' '.join(before) or 'nothing'}")
        seen[i, chunk] = before + kind
    wanted = {(i, chunk) for i in range(schedule.m) for chunk in range(schedule.v)}
    for i, chunk in sorted(wanted | seen.keys()):
        if (i, chunk) not in wanted:
            raise ValueError(f"{schedule.name}: rank {rank} works on micro-batch {i}, chunk "
                             f"{chunk}, of {schedule.m} micro-batches and {schedule.v} chunks")
        if seen.get((i, chunk)) not in ("FB", "FIW"):
            raise ValueError(f"{schedule.name}: rank {rank} never finishes micro-batch {i}, chunk "
                             f"{chunk}")


def borders(schedule):
    """List the micro-batches that cross each border between ranks, as both sides see it.

    -> {(pass, from stage, to stage): ([sent], [received])}"""
    found = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            kind, here = passed(action[0]), schedule.stage(rank, action[2])
            source, target = schedule.neighbours(rank, action)
            if target is not None and schedule.home(target)[0] != rank:
                found.setdefault((kind, here, target), ([], []))[0].append(action[1])
            if source is not None and schedule.home(source)[0] != rank:
                found.setdefault((kind, source, here), ([], []))[1].append(action[1])
    return found


class Walk:
    """Ranks on their way through their lists, each as far as it can go.

    ahead: None, a send returns at once; a number, it waits until its receive is posted, which
    happens that many actions before the action that needs it."""

    def __init__(self, schedule, ahead=None):
        self.schedule, self.ahead = schedule, ahead
        self.at = [0] * schedule.p                          # the action that a rank is at
        self.sending = [False] * schedule.p                 # it is computed, but not sent
        self.results = set()                                # (pass, micro-batch, stage) computed
        self.place = {} if ahead is None else {
            (rank, passed(action[0]), *action[1:]): k
            for rank, actions in enumerate(schedule.actions) for k, action in enumerate(actions)}

    def __iter__(self):
        """Yield (rank, action) in an order in which all can be taken.  ValueError: a deadlock"""
        stuck = False
        while not stuck:
            stuck = True
            for rank in range(self.schedule.p):
                while self.action(rank) and self.waits_for(rank) is None:
                    stuck = False
                    if not self.sending[rank]:
                        yield rank, self.action(rank)
                    self.advance(rank)
        if any(map(self.action, range(self.schedule.p))):
            raise ValueError(f"{self.schedule.name} deadlocks: {self.cycle()}")

    def action(self, rank):
        """Look up the action that a rank is at; None at the end of its list."""
        actions = self.schedule.actions[rank]
        return actions[self.at[rank]] if self.at[rank] < len(actions) else None

    def advance(self, rank):
        """Note that an action is computed, or that its result is sent."""
        kind, i, chunk = self.action(rank)
        self.results.add((passed(kind), i, self.schedule.stage(rank, chunk)))
        _, target = self.schedule.neighbours(rank, (kind, i, chunk))
        crosses = target is not None and self.schedule.home(target)[0] != rank
        self.sending[rank] = crosses and self.ahead is not None and not self.sending[rank]
        self.at[rank] += not self.sending[rank]

    def waits_for(self, rank):
        """Name the rank for which a rank has to wait now, or None."""
        kind, i, chunk = self.action(rank)
        source, target = self.schedule.neighbours(rank, (kind, i, chunk))
        if not self.sending[rank]:
            missing = source is not None and (passed(kind), i, source) not in self.results
            return self.schedule.home(source)[0] if missing else None
        to, chunk = self.schedule.home(target)
        posted = self.at[to] + self.ahead >= self.place[to, passed(kind), i, chunk]
        return None if posted else to

    def cycle(self):
        """Say who waits for whom, around the cycle."""
        rank, seen = next(r for r in range(self.schedule.p) if self.action(r)), []
        while rank not in seen:
            seen.append(rank)
            rank = self.waits_for(rank)
            if self.action(rank) is None:
                break
        says = [f"rank {r} waits to {'send' if self.sending[r] else 'receive for'} "
                f"{' '.join(map(str, self.action(r)))} "
                f"{'to' if self.sending[r] else 'from'} rank {self.waits_for(r)}"
                for r in seen[seen.index(rank) if rank in seen else 0:]]
        return "; ".join(says)


def passed(kind):
    """Name the pass that an action completes for other stages: an I is their B."""
    return "B" if kind == "I" else kind
