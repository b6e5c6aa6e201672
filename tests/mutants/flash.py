"""What may go wrong in the functions of lessons.flash."""

MUTANTS = {
    "merge": [
        ("lse[...] = np.logaddexp(lse, lse_new)", "pass"),                    # lse not carried on
        ("np.logaddexp(lse, lse_new)", "np.maximum(lse, lse_new)"),
        ("np.exp(-np.logaddexp(0, -ahead))", "0.5 + 0 * ahead"),               # by number of tiles
        ("np.logaddexp(0, -ahead)", "np.logaddexp(0, ahead)"),                # the old one's share
        ("np.exp(-np.logaddexp(0, -ahead))", "np.exp(ahead) / (1 + np.exp(ahead))"),   # overflows
        ("np.maximum(lse, np.finfo(lse.dtype).min)", "lse"),                  # -inf - -inf
        ("out_new - out", "out_new"),                                         # old one not rescaled
        ("out += out_new", "out = out + out_new"),                            # not in place
    ],
}
