"""What may go wrong in the functions of lessons.sp."""

GATHERED = "collectives.all_gather(x.data, comm, dim, sizes)"
SCATTERED = "collectives.reduce_scatter(g, comm, dim, sizes)"
TWICE = """y = functional.linear(all_gather(x, comm, TOKENS), w, b)
    mine = x.data

    def vjp(g):
        rows = g.reshape(-1, g.shape[-1])

        def of_weight():
            x_full = collectives.all_gather(mine, comm, TOKENS)"""
ONCE = """x_full = all_gather(x, comm, TOKENS).data
        y = functional.linear(Tensor(x_full), w, b)

    def vjp(g):
        rows = g.reshape(-1, g.shape[-1])

        def of_weight():"""
LATER = "collectives.reduce_scatter(product(g, w.data), comm, TOKENS)"

MUTANTS = {
    "all_gather": [
        (SCATTERED, "collectives.split(g, dim, sizes)[comm.rank]"),   # as if all used it alike
        (SCATTERED, SCATTERED + " / comm.size"),
        (SCATTERED, "collectives.reduce_scatter(0 * g + 1, comm, dim, sizes)"),
        (SCATTERED, "collectives.reduce_scatter(g, comm, dim)"),
        (SCATTERED, SCATTERED + ".astype(float)"),
        (SCATTERED, "collectives.split(collectives.all_reduce(g, comm), dim, sizes)[comm.rank]"),
        ("sizes = sizes or", "sizes ="),                              # sizes ignored
        (GATHERED, "collectives.all_gather(x.data, comm, 0, sizes)"),
        (GATHERED, GATHERED + ".astype(float)"),
        (GATHERED, "np.flip(" + GATHERED + ", dim)"),
        (GATHERED, "np.concatenate([x.data] * comm.size, dim)"),      # nobody else's
        (", (x,),", ", (Tensor(x.data),),"),
    ],
    "reduce_scatter": [
        ("collectives.all_gather(g, ", "collectives.all_gather(2 * g, "),
        ("collectives.all_gather(g, ", "collectives.all_gather(g / comm.size, "),
        ("(collectives.all_gather(g, comm, dim, sizes),)",
         "(np.concatenate([g] * comm.size, dim),)"),
        ("collectives.all_gather(g, ", "collectives.all_gather(0 * g + 1, "),
        ("chunks(x.shape[dim], comm.size)", "[x.shape[dim] // comm.size] * comm.size"),
        ("sizes = sizes or", "sizes ="),
        ("collectives.reduce_scatter(x.data, comm, dim, sizes)",
         "collectives.split(x.data, dim, sizes)[comm.rank]"),         # no sum
        ("collectives.reduce_scatter(x.data, comm, dim, sizes)",
         "collectives.split(collectives.all_reduce(x.data, comm), dim, sizes)[comm.rank]"),
        ("collectives.reduce_scatter(x.data, comm, dim, sizes)",
         "collectives.reduce_scatter(x.data, comm, dim, sizes) / x.dtype.type(comm.size)"),
        ("reduce_scatter(x.data, ", "reduce_scatter(x.data.astype(float), "),
        ("reduce_scatter(x.data, comm, dim, sizes)", "reduce_scatter(x.data, comm, 0, sizes)"),
        (", (x,),", ", (Tensor(x.data),),"),
    ],
    "all_gather_linear": [
        (TWICE, ONCE),                                                # x kept whole
        ("product(rows.T, ", "product(2 * rows.T, "),
        (LATER, "np.split(g @ w.data, comm.size, TOKENS)[comm.rank]"),  # no sum
        ("def vjp(g):", "def vjp(g, w=Tensor(w.data)):"),             # w kept from forward
        (LATER, LATER + " / comm.size"),
        ("summed(rows, 0)", "rows.mean(0)"),
        ("summed(rows, 0)", "collectives.all_reduce(rows.sum(0), comm)"),
        (" if b is None else (of_x, of_weight, lambda: summed(rows, 0))", ""),
        ("w, b)\n    mine", "w, None)\n    mine"),                    # b is added by nobody
        ("x_full = collectives.all_gather(mine, comm, TOKENS)",
         "x_full = np.concatenate([mine] * comm.size, TOKENS)"),
        ("    mine = x.data\n", "    mine, whole = x.data, all_gather(x, comm, TOKENS).data\n"),
        ("        return (of_x, of_weight) if", "        of_weight = of_weight()[::-1]\n"
         "        return (of_x, of_weight) if"),
        ("(x, w) if b is None else (x, w, b), vjp", "(x, w), lambda g: vjp(g)[:2]"),
        ("g.reshape(-1, g.shape[-1])", "g[:1].reshape(-1, g.shape[-1]).repeat(len(g), 0)"),
    ],
}
SAME = "sizes = sizes or [x.shape[dim]] * comm.size"
RIGHT = {
    "all_gather": [(SAME, "sizes = np.array(sizes or [x.shape[dim]] * comm.size)"),
                   (SAME, "if sizes is None:\n        sizes = comm.size * (x.shape[dim],)")],
    "reduce_scatter": [("sizes = sizes or chunks(x.shape[dim], comm.size)",
                        "sizes = sizes or [len(part) for part in "
                        "np.array_split(np.arange(x.shape[dim]), comm.size)]")],
    "all_gather_linear": [
        ("product(rows.T, ", "np.matmul(rows.T, "),
        ("return (of_x, of_weight) if b is None else (of_x, of_weight, lambda: summed(rows, 0))",
         "return [of_x, of_weight()] if b is None else [of_x, of_weight(), rows.sum(0)]")],
}
