"""What may go wrong in the functions of lessons.checkpoint."""

MUTANTS = {
    "slots": [
        ("optimizer.target(p)[0] if optimizer else p.data", "p.data"),        # what ZeRO's lacks
        ("optimizer.target(p)[0]", "optimizer.target(p)[0].copy()"),          # nothing is loaded
        ("optimizer.state.get(p.name) or ", "() or "),                        # always zero
        ("optimizer.moment_names if optimizer and p.requires_grad else ()", "()"),
        ("optimizer and p.requires_grad", "optimizer"),                       # of frozen ones, too
        ("in zip(names, moments)", "in zip(names[:1], moments)"),             # v is lost
        ("in zip(names, moments)", "in zip(names, moments[::-1])"),           # m for v
        ("[np.zeros_like(piece) for _ in names]", "[]"),                      # before a step
        ("[np.zeros_like(piece) for _ in names]", "[np.ones_like(piece) for _ in names]"),
        ("optimizer.moment_names if", "('m', 'v') if"),                       # AdamW's, always
        ('f"{p.name}.{name}"', "p.name"),
    ],
    "fill": [
        ("lay(p, x, sliced)", "lay(p, x)"),                                   # all of it
        ("lay(p, x, sliced)", "lay(p, x, True)"),
        ("lay(p, x, sliced)", "x"),                                           # the first piece
        ("piece[...] =", "piece ="),                                          # nothing is written
        ("piece[...] =", "piece[...] +="),
        ("[:piece.size]", "[-piece.size:]"),                                  # padding for numbers
        ("[:piece.size]", "[::-1][:piece.size]"),
        ("mine.reshape(-1)", "mine.T.reshape(-1)"),
        (".reshape(piece.shape)", ".reshape(piece.shape) * 2"),
    ],
    "commit": [
        ('    write_json(part / INDEX, {"format": FORMAT, **index})\n', ""),
        ('"format": FORMAT, ', ""),
        ("**index", ""),
        ("    sync(part)\n", ""),                                             # names may be lost
        ("if target.exists():", "if False:"),
        ("os.rename(target, old)", "remove(target)"),                         # nothing, a while
        ("        remove(old)\n", ""),                                        # one is in the way
        ("beside(target, OLD)", "beside(target, PART + OLD)"),                # nobody looks there
        ("    os.rename(part, target)\n", ""),
        ("os.rename(part, target)", "shutil.copytree(part, target)"),
        ("    sync(target.parent)\n", ""),
        ("    os.replace(draft, target.parent / LATEST)\n", ""),
        ("draft = target.parent / (LATEST + PART)", "draft = target.parent / LATEST"),
        ('{"checkpoint": target.name}', '{"checkpoint": part.name}'),
    ],
}
RIGHT = {
    "commit": [
        ("os.rename(part, target)", "part.rename(target)"),
        ("    draft =", "    remove(old)\n    draft ="),                      # it is replaced
    ],
    "fill": [("mine.reshape(-1)", "mine.ravel()")],
    "slots": [("if optimizer else p.data", "if optimizer is not None else p.data")],
}
