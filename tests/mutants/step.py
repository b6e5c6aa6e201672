"""What may go wrong in the functions of lessons.step."""

BODY = """flat = np.ascontiguousarray(x.data).reshape(-1), y.reshape(-1), slope.reshape(-1)
    with np.errstate(over="ignore"):                        # exp(-2u) = inf: sigmoid is 0
        for i in range(0, x.size, PIECE):
            _gelu_piece(*(a[i:i + PIECE] for a in flat))"""
AHEAD = "y += b.data\n"

MUTANTS = {
    "layer_norm": [
        ("unit * w.data", "unit * 1"),
        ("y += b.data", "pass"),
        (" + real(eps))", ")"),                                        # no eps
        ("/ real(d) + real(eps))", "/ real(d)) + real(eps)"),          # after the root
        ("1 / np.sqrt(", "np.sqrt("),
        ("- (rows @ one / real(d))[:, None]", "* 1"),                  # RMSNorm
        ("unit, unit) / real(d)", "unit, unit) / real(d - 1)"),        # unbiased
        ("eps=1e-5", "eps=1e-3"),
        ("real(eps)", "real(1e-5)"),
        ("gx -= mean[:, None]", "pass"),
        ("gx -= np.multiply(unit, along[:, None], out=work)", "pass"),
        ("gx *= scale[:, None]", "pass"),
        ("gx = g * w.data", "gx = g * 1"),
        ("gx = g * w.data", "gx = np.multiply(g, w.data, out=g)"),     # g overwritten
        ("_column_sum(work), _column_sum(g)", "_column_sum(g), _column_sum(work)"),
        ("_column_sum(work)", "_column_sum(work) / len(g)"),
        ("unit.astype(dtype, copy=False)", "unit.astype(np.float64)"),
        ("rows - (rows", "rows.__isub__(rows"),                        # x overwritten
        (AHEAD, AHEAD + "    y = x.data.reshape(y.shape) + 0\n"),      # the identity
    ],
    "gelu": [
        ("np.multiply(g, slope, out=slope)", "np.multiply(x.data, slope, out=slope)"),
        ("np.multiply(g, slope, out=slope)", "np.multiply(g, slope, out=g)"),   # g overwritten
        ("np.multiply(g, slope, out=slope)", "slope"),                          # g is 1
        ("np.multiply(g, slope, out=slope)", "g * (x.data > 0)"),               # as of a ReLU
        ("for i in range(0, x.size, PIECE)", "y[...] = 0\n        for i in range(0, PIECE, PIECE)"),
        ("for i in range(0, x.size, PIECE)",                             # whole pieces only
         "y[...] = 0\n        for i in range(0, x.size - PIECE + 1, PIECE)"),
        (BODY, "y[...] = x.data\n    slope[...] = 1"),                          # the identity
        (BODY, "s = 1 / (1 + np.exp(-x.data))\n    y[...] = x.data * s\n"
               "    slope[...] = s * (1 + x.data * (1 - s))"),                  # SiLU
        (BODY, "s = 1 / (1 + np.exp(-1.702 * x.data))\n    y[...] = x.data * s\n"
               "    slope[...] = s * (1 + 1.702 * x.data * (1 - s))"),          # the quick one
        (BODY, "from math import erf, pi\n"
               "    Phi = np.vectorize(lambda a: (1 + erf(a / 2 ** 0.5)) / 2)(x.data)\n"
               "    y[...] = x.data * Phi\n    slope[...] = Phi + x.data * "
               "np.exp(-x.data ** 2 / 2) / (2 * pi) ** 0.5"),                   # the exact one
        ("np.empty(x.shape, x.dtype), np.empty", "np.empty(x.shape), np.empty"),    # float64
        ("np.empty(x.shape, x.dtype), np.empty", "x.data, np.empty"),           # x overwritten
    ],
}
RIGHT = {
    "gelu": [(BODY, "u = (8 / np.pi) ** 0.5 * (x.data + 0.044715 * x.data ** 3)\n"
                    "    s = 1 / (1 + np.exp(-np.clip(u, -80, None)))\n"
                    "    y[...] = x.data * s\n    slope[...] = s * (1 + x.data * (1 - s)"
                    " * (8 / np.pi) ** 0.5 * (1 + 3 * 0.044715 * x.data ** 2))"),
             ("np.multiply(g, slope, out=slope)", "g * slope")],
}
