"""What may go wrong in the functions of lessons.step."""

MUTANTS = {
    "layer_norm": [
        ("unit * w.data", "unit * 1"),
    ],
    "gelu": [
        ("np.multiply(g, slope, out=slope)", "np.multiply(x.data, slope, out=slope)"),
    ],
}
