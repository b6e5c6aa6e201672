"""What may go wrong in the functions of lessons.schedules."""

MUTANTS = {
    "interleaved": [
        ("v - 1 - c", "c"),
        ("2 * (p - rank - 1)", "(p - rank - 1)"),
        ("(v - 1) *", "v *"),
        ("max(1, m // p)", "1"),
        ("if k >= warmup", "if k > warmup"),
        ("m * v + warmup", "m * v"),
        ("for c in range(v) for i in some", "for i in some for c in range(v)"),
    ],
    "zb_h1": [
        ("i - late >= rank", "i - late > rank"),
        (">= rank", ">= 0"),
        ("late += 1", "pass"),
        ("range(late, m)", "range(late + 1, m)"),
        ('"I" if kind == "B" else kind', 'kind'),
        ('yield "W", late', 'yield "W", i'),
        (">= rank", ">= m"),
    ],
}
