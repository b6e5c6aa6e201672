"""What may go wrong in the functions of lessons.recompute."""

MUTANTS = {
    "checkpoint": [
        ("again(fn, *inputs).node", "fn(*inputs).node"),                      # not as a repetition
        ("rewound(rng, state)", "rewound(None, state)"),
        ("cut_off(arg) for arg", "arg for arg"),                              # the graph goes on
        ("origin.get(leaf, leaf) for", "leaf for"),                           # gradients of inputs
        ("gradients(root, g)", "gradients(root, 2 * g)"),
        ("Tensor(y.data, parents, vjp)", "y"),                                # nothing forgotten
        ("for leaf in leaves]\n\n    def", "for leaf in leaves[:1]]\n\n    def"),
        ("Tensor(y.data, parents, vjp)", "Tensor(2 * y.data, parents, vjp)"),
    ],
}
