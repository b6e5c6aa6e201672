"""What may go wrong in the functions of lessons.walls."""

MUTANTS = {
    "linear_work": [
        ("+ N * F, w", ", w"),                                # no bias
        ("2 * N * D * F", "N * D * F"),                       # a multiply-add is one flop
        ("+ N * F, w", "+ N * D, w"),
        ("w * (", "4 * ("),                                   # w ignored
        ("D, F, w=4):", "D, F, w=4):\n    F = 4 * D"),
        ("N * D + D * F + F", "N * D + D * F"),               # the bias is read for nothing
        ("D * F + F + N * F))", "D * F + F))"),               # writing is free
        ("(N * D + D * F", "(N * D + N * D * F"),             # weights read for every token
        ("D * F + F + N * F))", "F + N * F))"),               # weights are free
        ("w=4", "w=8"),
    ],
    "attention_work": [
        ("w * 4 *", "w * 3 *"),
        ("w * 4 *", "4 * 4 *"),                               # w ignored
        ("w * 4 * B * T * D", "w * 4 * T * D"),               # B forgotten
        ("2 * 2 * B * D *", "2 * 2 * D *"),
        ("2 * 2 * B", "2 * B"),                               # one product of the two
        ("tiles(T, tile)", "T * T"),                          # the whole square
        ("tiles(T, tile)", "T * T / 2"),                      # half of it, whatever the tile
        ("tiles(T, tile)", "tiles(T, 64)"),                   # tile ignored
        ("tiles(T, tile)", "T * (T + tile) / 2"),             # T a multiple of the tile
        ("w * 4 * B * T * D", "w * (4 * B * T * D + B * T * T)"),
        ("w=4", "w=2"),
    ],
    "at_least": [
        ("max(", "min("),
        ("max(work.flops / peak, work.bytes / bandwidth)",
         "work.flops / peak + work.bytes / bandwidth"),
        ("flops / peak", "flops // peak"),                    # floor division
        ("bytes / bandwidth", "bytes // bandwidth"),
        ("work.flops / peak", "work.flops / bandwidth"),
        ("work.bytes / bandwidth", "work.bytes / peak"),
        ("max(work.flops / peak, work.bytes / bandwidth)", "work.flops / peak"),
        ("max(work.flops / peak, work.bytes / bandwidth)", "work.bytes / bandwidth"),
        ("work.flops / peak", "round(work.flops / peak)"),
        ("flops / peak", "flops * peak"),
    ],
}
RIGHT = {
    "linear_work": [("2 * N * D * F + N * F", "N * F * (1 + 2 * D)")],
    "attention_work": [("tiles(T, tile)",
                        "sum(min(i // tile * tile + tile, T) for i in range(T))")],
    "at_least": [("max(work.flops / peak, work.bytes / bandwidth)",
                  "float(sorted([work.bytes / bandwidth, work.flops / peak])[1])")],
}
