"""What may go wrong in the functions of lessons.zero."""

MUTANTS = {
    "attach": [
        ("p.grad[:piece.size]", "2 * p.grad[:piece.size]"),
        ("[flat.mine]", "[:flat.size]"),                                      # the first rank's
        ("[flat.mine]", "[flat.mine].copy()"),                                # nothing is written
        ("append(model.gather_all)", "append(lambda: None)"),
        ("optimizer.target = target", "pass"),
        ("return p.data, p.grad", "return p.data, None"),                     # stage 3 stands still
        ("return p.data, p.grad", "return p.data, 2 * p.grad"),
    ],
    "gather_updated": [
        ("[p.data for p in params]", "[p.data + 0 for p in params]"),
        ("p.sliced[key].mine", "p.sliced[key].mine.start:"),                  # more than my piece
        (".mine] for", ".mine] * 2 for"),
        ("buckets.gather(mine,", "(mine,"),                                   # never sent
        ("buckets.gather(mine,", "buckets.gather(mine[::-1],"),
        ("p.data.reshape(-1)[", "p.data.reshape(-1).copy()[0:0] * p.data.reshape(-1)["),
        ("p.sliced[key].mine", "0:p.sliced[key].size"),                       # the first rank's
    ],
    "keep_sum": [
        ("sums[p.name] + p.grad if", "p.grad if"),                            # the last pass
        ("sums[p.name] + p.grad if", "sums[p.name] if"),                      # the first pass
        ("sums[p.name] + p.grad if", "(sums[p.name] + p.grad) / 2 if"),
        ("sums[p.name] + p.grad if", "sums[p.name] - p.grad if"),
        ("bucket.hand_out(row)", "bucket.hand_out()"),                        # before the sum
        ("bucket.hand_out(row)", "pass"),
        ("p.grad = None", "pass"),
    ],
    "send_for": [
        ("[pieces[p.name] for", "[2 * pieces[p.name] for"),
        ("[pieces[p.name] for", "[0 * pieces[p.name] for"),
        ("p.placements[key].shape", "p.data.shape"),                          # a piece, not a whole
        ("p.placements[key].shape", "p.placements[key].shape[::-1]"),
        ("p.dtype == dtype]", "p.dtype == dtype][1:]"),
        ("return sent", "return []"),
        ("gather, mine, wholes", "gather, mine[::-1], wholes"),
    ],
    "free": [
        ("p.data = pieces[p.name]", "pass"),
        ("p.data = pieces[p.name]", "p.data = pieces[p.name].copy()"),        # updates are lost
        ("p.data = pieces[p.name]", "p.data = 0 * pieces[p.name]"),
        ("in params:", "in params[1:]:"),
        ("in params:", "in params[:1]:"),
        ("p.data = pieces[p.name]", "p.data[:] = 0"),
        ("p.data = pieces[p.name]", "p.data = p.data.reshape(-1)[:pieces[p.name].size]"),
    ],
}
