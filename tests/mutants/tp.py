"""What may go wrong in the functions of lessons.tp."""

SEND = "collectives.all_reduce(g, comm)"
TOP = 'all_reduce(logits.data.max(-1, initial=-np.inf), comm, op="max")'

MUTANTS = {
    "copy_to": [
        (SEND, "g"),
        (SEND, SEND + " / comm.size"),                                # a mean
        (SEND, "collectives.all_reduce(0 * g + 1, comm)"),            # g is 1
        (SEND, SEND + ".astype(float)"),
        (SEND, "collectives.all_reduce(g, comm, op='max')"),
        (SEND, SEND + " * 2"),
        ("Tensor(x.data,", "Tensor(collectives.all_reduce(x.data, comm),"),
        ("Tensor(x.data,", "Tensor(collectives.all_reduce(x.data, comm) / comm.size,"),
        (SEND, "collectives.all_reduce(" + SEND + ", comm) / comm.size"),      # twice the traffic
        (SEND, "g.__iadd__(" + SEND + " - g)"),                       # g overwritten
        (", (x,),", ", (Tensor(x.data),),"),                          # off the tape
    ],
    "reduce_from": [
        ("(g,)", "(collectives.all_reduce(g, comm),)"),
        ("(g,)", "(g / comm.size,)"),
        ("(g,)", "(0 * g + 1,)"),
        ("(g,)", "(g if comm.rank == 0 else 0 * g,)"),
        ("collectives.all_reduce(x.data, comm)", "x.data"),
        ("collectives.all_reduce(x.data, comm)",
         "(collectives.all_reduce(x.data, comm) / comm.size).astype(x.dtype)"),
        ("all_reduce(x.data, comm)", "all_reduce(x.data.astype(float), comm)"),
        ("collectives.all_reduce(x.data, comm)", "collectives.all_reduce(x.data, comm, op='max')"),
        ("collectives.all_reduce(x.data, comm)",
         "x.data.__iadd__(collectives.all_reduce(x.data, comm) - x.data)"),    # x overwritten
        (", (x,),", ", (Tensor(x.data),),"),
        ("(g,)", "(-g,)"),
    ],
    "vocab_parallel_cross_entropy": [
        ("mine[here]] -= 1", "mine[here]] -= 2"),
        ("(g * counted)", "(1 * counted)"),                           # the gradient forgets g
        ("(g * counted)", "(g + 0 * counted)"),                       # ignored tokens learn
        ("- hit) * counted)", "- hit))"),                             # ignored tokens count
        (TOP, "np.zeros(targets.shape, logits.dtype)"),               # overflows
        (TOP, "logits.data.max(-1, initial=-np.inf)"),                # everyone's own largest
        ("hit = all_reduce(hit, comm)", "pass"),
        ("total = all_reduce(np.exp(z, out=z).sum(-1), comm)", "total = np.exp(z, out=z).sum(-1)"),
        (", initial=-np.inf", ""),                                    # a rank without words
        ("sizes = sizes or", "sizes ="),                              # sizes ignored
        ("z = logits.data - np.where(counted, top, 0)[..., None]",
         "z = np.subtract(logits.data, np.where(counted, top, 0)[..., None], out=logits.data)"),
        ("return (z,)", "return (z + 0 * logits.data[:],)"),          # logits kept
        ("z[~counted] = 0  ", "pass  "),                              # nan in what does not count
        ("hit[here] = z[here, mine[here]]", "hit[...] = z[..., 0]"),
        ("z /= total[..., None]", "z /= z.sum(-1, keepdims=True)"),   # each rank's own softmax
        ("* counted).sum()", "* counted).mean()"),
        ("total = all_reduce(np.exp(z, out=z).sum(-1), comm)",
         "total = all_reduce(np.exp(z, out=z).sum(-1), comm)\n    all_reduce(hit, comm)"),
    ],
}
RIGHT = {
    "copy_to": [("Tensor(x.data,", "Tensor(x.data.copy(),")],
    "reduce_from": [("(g,)", "(g.copy(),)")],
    "vocab_parallel_cross_entropy": [
        ("z[~counted] = 0  ", "z = np.where(counted[..., None], z, 0)  "),
        ("sizes = sizes or [logits.shape[-1]] * comm.size",
         "sizes = np.array([logits.shape[-1]] * comm.size if sizes is None else sizes)")],
}
