"""Search: every way to spread a job over so many cards, those that fit, fastest first.

    candidates  ->  card.held(job) <= what is planned with  ->  card.seconds(job)  ->  sorted

A card says what a job holds and takes: see minidist.estimate and minidist.machine.

Run:    python -m minidist.plan --model gpt3 --cards 1024
Lesson: python -m lessons.plan
"""
from collections import Counter
from dataclasses import replace

from minidist import BadInput

ROOM = 0.9                          # of a card's memory: buffers and fragments take the rest


def candidates(job, card, cards):
    """Yield every way to spread a job over exactly so many cards that its sizes allow."""
    for tp, cp in axes_inside(job, card, cards):
        for pp in (n for n in range(1, job.L + 1) if cards // (tp * cp) % n == 0):
            if -(-job.L // pp) * pp > 1.1 * job.L:          # the longest stage has too much
                continue
            dp = cards // (tp * cp * pp)
            for rows in (1, 2, 4, 8, 16):
                if job.B % (dp * rows):
                    continue
                spread = replace(job, tp=tp, cp=cp, pp=pp, dp=dp, rows=rows, sp=tp > 1,
                                 tiled=card.fused, hidden=card.fused)
                for ep in (n for n in powers(dp) if dp % n == 0 and 256 % n == 0):
                    yield from on_each(replace(spread, ep=ep), card)
                    if not job.experts:
                        break


def axes_inside(job, card, cards):
    """Yield tp inside a node, and cp for rows that are long."""
    for tp in (n for n in powers(min(card.per_node, cards)) if job.H % n == 0 and cards % n == 0):
        for cp in (n for n in powers(min(16, cards // tp)) if cards // tp % n == 0):
            if cp == 1 or job.T // cp >= card.shortest:
                yield tp, cp


def on_each(job, card):
    """Yield what each card can do to hold less, and a pipeline's chunks."""
    replicas = job.dp * (1 if card.counted else job.cp)
    for zero in ((0, 1, 2, 3) if job.pp == 1 else (0, 1)) if replicas > 1 else (0,):
        for again in (None, "attention", "blocks"):
            for v in [1] if card.counted else chunks(job):
                yield replace(job, zero=zero, again=again, v=v)


def powers(most):
    return (2 ** i for i in range(most.bit_length()))


def chunks(job):
    """Chunks per stage: one, or what interleaving allows."""
    each = job.L // job.pp
    some = job.pp > 1 and job.L % job.pp == 0 and job.microbatches % job.pp == 0
    return [1] + [v for v in (2, 3, 4) if some and each % v == 0]


def search(job, card, cards):
    """Try all.  -> those that fit, fastest first [(Seconds, Job)]; the smallest that does not"""
    fits, smallest = [], None
    for each in candidates(job, card, cards):
        held = card.held(each).all
        if held <= ROOM * card.memory:
            fits.append((card.seconds(each), each))
        elif smallest is None or held < smallest[0]:
            smallest = held, each
    return sorted(fits, key=lambda pair: pair[0].all), smallest


def plans(job, card, cards):
    """Find the fastest plan, and the fastest of other kinds.  -> [(Seconds, Job)]; BadInput"""
    fits, smallest = search(job, card, cards)
    if not fits:
        raise BadInput(refusal(job, card, cards, smallest))
    seen, found = Counter(), []
    for took, each in fits:
        kind = each.tp, each.cp, each.ep > 1, each.pp > 1, each.zero > 0, each.again
        if not seen[kind]:
            found.append((took, each))
        seen[kind] += 1
    return found


def refusal(job, card, cards, smallest):
    """Say by how much it does not fit, and what would be enough."""
    if smallest is None:
        return (f"{job.B} rows do not divide over {cards} cards in any way that {job.L} layers and "
                f"{job.H} heads allow; use another --batch or --cards")
    held, each = smallest
    short = (f"{job.parameters / 1e9:,.1f}e9 parameters do not fit on {cards} cards of "
             f"{size(card.memory)}: the smallest plan, {each}, holds {size(held)} on one "
             f"card, {size(held - ROOM * card.memory)} too much")
    for times in (2, 4, 8, 16, 32, 64):
        if search(replace(job, B=job.B * times), card, cards * times)[0]:
            return f"{short}; use --cards {cards * times}, or cards with more --memory"
    return f"{short}; use many more --cards, or shorter rows (--context)"


def size(n):
    """Write bytes.  2.8e12 -> '2.8 TB'"""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if abs(n) >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n / 1e3:.3g} kB"
