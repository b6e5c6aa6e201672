"""What may go wrong in the functions of lessons.moe."""

MUTANTS = {
    "route": [
        ("p.data + bias, k)", "p.data, k)"),                                  # never heard
        ("p.data + bias, k)", "p.data - bias, k)"),
        ("choose(p.data if", "choose(-p.data if"),                            # the worst
        ("embedding(p.reshape", "embedding((p if bias is None else p + bias).reshape"),
        ("if k > 1 else gates, p", ", p"),                                    # 1 / 1: no gradient
        ("if k > 1 else gates, p", "if k > 9 else gates, p"),                 # never scaled
        ("embedding(p.reshape(-1, 1)", "embedding(Tensor(p.data.reshape(-1, 1))"),
        ("* p.shape[1] + chosen", "* k + chosen"),                            # another's gate
        ("tensor.sum(gates, 1, True)", "tensor.sum(p, 1, True)"),
        ("softmax(logits)", "softmax(logits, 0)"),                            # over tokens
    ],
    "balance_loss": [
        ("coefficient * len(counts)", "coefficient"),                         # without E
        ("coefficient * len(counts)", "coefficient * len(counts) / max(p.shape[0], 1)"),   # a mean
        ("counts / max(counts.sum(), 1)", "counts"),
        ("(p * f)", "(p * p)"),
        ("(p * f)", "(Tensor(p.data) * f + 0.0 * p)"),                        # no gradient
        ("coefficient * len(counts)", "coefficient * len(counts) ** 2"),
        ("coefficient * len(counts)", "coefficient * p.shape[0]"),
        ("counts / max", "(counts > 0) / max"),
    ],
    "expert_order": [
        ("order // k", "order % k"),
        ("order // k", "order"),
        ("np.where(kept, chosen, experts)", "np.where(kept, chosen, 0)"),     # dropped ones first
        ("np.arange(len(order))", "order"),
        ("row[order] = np.arange(len(order))", "row[:len(order)] = order"),   # the other way
        ("count(chosen[kept], experts)", "count(chosen, experts)"),
        ("[:kept.sum()]", ""),                                                # dropped ones too
        ("np.argsort(flat, kind=\"stable\")[", "np.arange(flat.size)["),      # not sorted
        ("np.argsort(flat", "np.argsort(-flat"),                              # backwards
    ],
    "to_tokens": [
        ("y += weights[:, j:j + 1] *", "y +="),                               # no gates
        ("y += weights[:, j:j + 1] * picked(rows, row[:, j], kept[:, j])",
         "y += weights[:, j:j + 1] * rows[row[:, j]] if len(rows) else 0"),   # garbage
        ("y += weights", "y = weights"),                                      # the last one
        ("np.einsum(\"nd,nd->n\", g,", "0 * np.einsum(\"nd,nd->n\", g,"),     # gates do not learn
        ("(weights[:, j:j + 1] * g)[", "(1.0 * g)["),
        ("of_out[row[kept[:, j], j]] = (weights[:, j:j + 1] * g)[kept[:, j]]",
         "of_out[row[:, j]] = weights[:, j:j + 1] * g if len(rows) else 0"),  # the dropped, too
        ("range(row.shape[1])", "range(1)"),                                  # the first expert's
        ("weights[:, j:j + 1] * picked", "weights[:, :1] * picked"),          # the first gate
        ("return of_out, of_gates", "return 2 * of_out, of_gates"),
    ],
}
