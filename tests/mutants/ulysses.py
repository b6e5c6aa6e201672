"""What may go wrong in the functions of lessons.ulysses."""

MUTANTS = {
    "to_heads": [
        ("apart=HEADS, together=TOKENS", "apart=TOKENS, together=HEADS"),
        ("apart=HEADS, together=TOKENS", "apart=HEADS, together=HEADS"),
        ("apart=HEADS, together=TOKENS", "apart=TOKENS, together=TOKENS"),
        ("apart=HEADS, together=TOKENS", "apart=3, together=TOKENS"),
        ("all_to_all(x,", "all_to_all(Tensor(x.data),"),                      # off the tape
        ("all_to_all(x,", "all_to_all(x * 2.0,"),
    ],
    "to_tokens": [
        ("apart=TOKENS, together=HEADS", "apart=HEADS, together=TOKENS"),
        ("apart=TOKENS, together=HEADS", "apart=TOKENS, together=TOKENS"),
        ("apart=TOKENS, together=HEADS", "apart=HEADS, together=HEADS"),
        ("apart=TOKENS, together=HEADS", "apart=TOKENS, together=3"),
        ("all_to_all(x,", "all_to_all(Tensor(x.data),"),
        ("all_to_all(x,", "all_to_all(x * 2.0,"),
    ],
}
