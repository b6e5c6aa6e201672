"""Mutants of the functions of lessons.rates."""
MUTANTS = {
    "zero_memory": [
        ("for first in (3, 2, 1)", "for first in (1, 2, 3)"),
        ("stage >= first", "stage > first"),
        ("stage >= first", "stage == first"),
        ("1 / p if", "1 if"),
        ("(w, w, state)", "(w, state, w)"),
        ("(w, w, state)", "(w, w, 0)"),
        ("(w, w, state)", "(w, 2 * w, state)"),
        ("parameters * sum", "sum")],
    "compressed": [
        ("group.all_reduce(n, 2)", "group.all_reduce(n, w)"),
        ("flags + group.all_reduce(1, 8)", "flags"),
        ("group.all_gather(k, w) + group.all_gather(k, 4)", "group.all_gather(k, w)"),
        ("group.all_gather(k, w) + group.all_gather(k, 4)", "2 * group.all_gather(k, w)"),
        ("[kept(n, number)] * p", "[max(1, int(n * number) - 1)] * p"),
        ("-(-size // 8)", "size // 8"),
        ("flags + scales + signs + scales", "flags + scales + signs"),
        ("flags + scales + signs + scales", "flags + scales + scales"),
        (" + group.all_gather(texts, 1)", ""),
        ("plain = n - sum(n * m for n, m, _ in narrow)", "plain = n"),
        ("size[i] * size[2]", "size[i]"),
        ("for i in (0, 1)]", "for i in (0, 0)]"),
        ("group.all_reduce(len(shapes), w)", "NOTHING")],
}
RIGHT = {"zero_memory": [("(w, w, state)", "[w, w, state]")],
         "compressed": [("n, flags = sum(sizes), group.all_reduce(len(shapes), w)",
                         "flags, n = group.all_reduce(len(shapes), w), sum(sizes)")]}
