"""One process: tensors that remember, the modules, the plain GPT, optimizers, data."""
