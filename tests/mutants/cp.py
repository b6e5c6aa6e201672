"""What may go wrong in the functions of lessons.cp."""

MUTANTS = {
    "forward": [
        ("sights[comm.rank - step]", "sights[comm.rank]"),
        ("sights[comm.rank - step]", "sights[comm.rank + step - comm.size]"),  # other direction
        ("step < comm.size - 1", "step < comm.size"),                         # one hop too many
        ("arrive() if arrive else None", "kv"),                               # never takes the next
        ("flash.attend(q, *kv,", "flash.attend(q, kv[1], kv[0],"),
        ("range(comm.size)", "range(max(1, comm.size - 1))"),                 # misses one block
        ("flash.nothing(q)", "(np.zeros_like(q), np.zeros(q.shape[:2]))"),    # a key of score 0
    ],
    "backward": [
        ("sights[comm.rank - step]", "sights[comm.rank]"),
        ("home + gathered()", "home"),                                        # last gradient lost
        ("gkv + gathered() if gathered else gkv", "gkv"),                     # not added up
        ("np.zeros_like(kv) if step else home", "np.zeros_like(kv)"),         # own gradient lost
        ("np.zeros_like(kv) if step else home", "home"),                      # all in one array
        ("arrive() if arrive else None", "kv"),                               # stale keys
        ("step < comm.size - 1", "step < comm.size"),                         # one hop too many
        ("np.zeros_like(q[..., :-1])", "q[..., :-1].copy()"),
    ],
}
