"""What may go wrong in the functions of lessons.precision."""

MUTANTS = {
    "to_bfloat16": [
        ("odd + 0x7FFF", "0x8000"),                                    # ties away from zero
        ("odd + 0x7FFF", "0x7FFF"),                                    # ties to zero
        ("odd + 0x7FFF", "1 - odd + 0x7FFF"),                          # ties to odd
        ("(odd + 0x7FFF)", "0"),                                       # cut off
        ("(odd + 0x7FFF)", "0xFFFF"),                                  # upwards
        ("bits >> 16 & 1", "bits >> 15 & 1"),                          # the wrong bit
        ("& 0xFFFF0000", "& 0xFFFF8000"),                              # one bit too many
        ("np.where(np.isnan(x), x.dtype.type(np.nan), near.view(np.float32))",
         "near.view(np.float32)"),                                     # a NaN carries over to -0
        ("x.dtype.type(np.nan)", "x.dtype.type(np.inf)"),
        ("np.isnan(x)", "~np.isfinite(x)"),                            # infinities as well
        ("x.view(np.uint32)", "x.view(np.int32)"),                     # shifts bring in the sign
    ],
    "moved": [
        ("scale.left - 1", "scale.left"),
        ("if left > 0", "if left >= 0"),
        ("if left > 0", "if left > 1"),
        ("scale.value / 2,", "scale.value / 4,"),
        ("max(scale.value / 2, scale.minimum)", "scale.value / 2"),
        ("clean=0, left=left", "clean=scale.clean, left=left"),
        ("clean=0, left=left", "clean=0, left=scale.hysteresis"),      # refilled at once
        ("scale.clean + 1 < scale.window", "scale.clean < scale.window"),
        ("clean=scale.clean + 1)", "clean=scale.clean + 1, left=scale.hysteresis)"),
        ("scale.value * 2, clean=0, left=scale.hysteresis", "scale.value * 2, clean=0"),
        ("scale.value * 2, clean=0", "scale.value * 2"),
        ("scale.value * 2", "scale.value"),
        ("if overflow", "if not overflow"),
    ],
    "update": [
        ("finalize(params, mesh, 1)", "finalize(params, mesh, count)"),
        ("finalize(params, mesh, 1)", "pass"),                         # never summed
        ("1 / (scale.value * count)", "1 / scale.value"),
        ("1 / (scale.value * count)", "1 / count"),                    # never unscaled
        ("1 / (scale.value * count)", "count / scale.value"),
        ("grad_norm(params, mesh) * unscale", "grad_norm(params, mesh)"),      # clips scaled ones
        ("clip_scale(norm, max_norm) * unscale", "clip_scale(norm, max_norm)"),
        ("clip_scale(norm, max_norm) * unscale", "unscale"),           # never clips
        ("overflowed(params, mesh)", "overflowed(params[:0], mesh)"),
        ("overflowed(params, mesh)", "any(not np.isfinite(p.grad).all() for p in params)"),
        ("if not overflow:", "if True:"),                              # never skips
        ("moved(scale, overflow)", "scale"),
        ("moved(scale, overflow)", "moved(scale, False)"),
        ("norm = np.inf", "norm = 0.0"),
        ("raise FloatingPointError(", "str("),
        ("scale.left <= 1 and", "scale.left < 1 and"),
        ("scale = optimizer.loss_scale\n", "scale = moved(optimizer.loss_scale, False)\n"),
    ],
}
RIGHT = {
    "to_bfloat16": [
        ("near.view(np.float32))", "((bits + 0x7FFF + (bits >> 16) % 2) >> 16 << 16)"
                                   ".view(np.float32))")],
    "update": [("scale.left <= 1 and", "scale.left < 2 and")],
}
