"""check_torch: an operation's value and gradients against PyTorch's, where that is installed.

Written with operators and the methods whose names both libraries share, the same fn also runs on
PyTorch's tensors; where names differ, a second function is the reference.  In a file of its own:
ranks that do not compare with it need not wait seconds for its import.
"""
import pytest

from tests.gradcheck import close, inputs, value_and_gradients

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch, the reference, is not installed")


def check_torch(fn, reference, *shapes, positive=False):
    """Compare value and gradients with PyTorch's, to 1e-10."""
    arrays = inputs(shapes, positive)
    y, g, grads = value_and_gradients(fn, arrays)
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
    ref_y = reference(*tensors)
    ref_y.backward(torch.tensor(g))
    close(y, ref_y.detach().numpy(), 1e-10)
    for grad, t in zip(grads, tensors):
        close(grad, t.grad.numpy(), 1e-10)
