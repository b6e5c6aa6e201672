"""What compressed gradients cost, in closed form: the messages that sum one bucket over ranks.

    cost.compressed("topk", [768, 48], cost.Group(4), 4, 0.01)      -> Price

Lesson: python -m lessons.compress
"""
import math

from minidist.cost.messages import NOTHING, all_to_all, chunks


def kept(n, fraction):
    """How many of n numbers topk sends: at least one."""
    return min(n, max(1, math.ceil(n * fraction)))


def low_rank(shape, rank):
    """The sizes n, m, r of a matrix that PowerSGD makes half as large at least; else ()."""
    n, m = shape[0] if shape else 1, math.prod(shape[1:])
    r = min(n, m, rank)
    return (n, m, r) if len(shape) > 1 and 2 * (n + m) * r < n * m else ()


def compressed(form, shapes, group, w, number=None):
    """Price of summing one bucket of parameters of these shapes, its flags included.

    number: the fraction of topk, the rank of powersgd."""
    sizes, p = [math.prod(shape) for shape in shapes], group.p
    n, flags = sum(sizes), group.all_reduce(len(shapes), w)
    if form == "fp16":
        return flags + group.all_reduce(1, 8) + group.all_reduce(n, 2)
    if form == "topk":
        k = [kept(n, number)] * p
        return flags + group.all_gather(k, w) + group.all_gather(k, 4)
    if form == "1bit":
        texts = [-(-size // 8) for size in chunks(n, p)]
        scales = group.all_gather([len(shapes)] * p, w)
        signs = all_to_all("pairwise", texts, 1, group.rank)
        return flags + scales + signs + scales + group.all_gather(texts, 1)
    narrow = [sizes for shape in shapes if (sizes := low_rank(shape, number))]
    plain = n - sum(n * m for n, m, _ in narrow)
    both = [sum(size[i] * size[2] for size in narrow) for i in (0, 1)]
    return flags + sum((group.all_reduce(size, w) for size in (plain, *both) if size), NOTHING)
