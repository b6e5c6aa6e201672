"""What may go wrong in the functions of lessons.memory."""

P = "sum(p.data.nbytes for p in params if not elsewhere(p.data))"
GRADIENTS = "gradient_bytes(model)"
STATE = "sum(array.nbytes for arrays in state for array in arrays)"
ROOTS = "*map(rooted, roots)"

MUTANTS = {
    "held": [
        ("p.data.nbytes for", "p.data.size for"),
        ("p.data.nbytes for", "4 * p.data.size for"),                 # 4 bytes hard-coded
        (GRADIENTS, "sum(p.data.nbytes for p in params)"),            # counted where None
        (GRADIENTS, "sum(p.data.nbytes for p in params if p.requires_grad)"),
        (GRADIENTS, "sum(4 * p.grad.size for p in params if p.grad is not None)"),
        (GRADIENTS, "0"),
        (P + ",\n                 " + GRADIENTS, GRADIENTS + ",\n                 " + P),
        (STATE, "2 * sum(p.data.nbytes for p in params) if optimizer else 0"),
        (STATE, "2 * gradient_bytes(model) if optimizer else 0"),
        (STATE, "sum(arrays[0].nbytes for arrays in state if len(arrays))"),
        (STATE, "0"),
        (ROOTS, "*map(rooted, roots[:1])"),                           # only the first root
        ("graph_bytes(" + ROOTS + ", exclude=known(model, batch))",         # shared ones twice
         "sum(graph_bytes(rooted(x), exclude=known(model, batch)) for x in roots)"),
        (", exclude=known(model, batch)", ""),
        ("known(model, batch)", "known(model)"),                      # the batch counts
        ("known(model, batch)", "known(model, batch)[len(params):]"),       # parameters count
        ("params = model.parameters()", "params = [p for _, _, p in model.slots()]"),   # tied twice
        ("params = model.parameters()",
         "params = [p for p in model.parameters() if p.requires_grad]"),
    ],
}
RIGHT = {
    "held": [("here(optimizer) if optimizer else ()",
              "[] if optimizer is None else list(here(optimizer))"),
             ("p.data.nbytes for", "p.data.size * p.data.itemsize for")],
}
