"""Linear layers for a few rows on a CPU.

A decode step multiplies a handful of rows, one per sequence, with every weight matrix. PyTorch's product `x @ Wᵀ`
handles so few rows badly on CPUs; the same product written as `(W @ xᵀ)ᵀ` takes half the time or less
(benchmarks/linear.py). The values are the same up to the order of additions.
"""

from types import MethodType

import torch
import torch.nn.functional as F

__all__ = ["FEW_ROWS_MAX", "FEW_ROWS_MIN", "speed_up_few_rows"]

FEW_ROWS_MIN, FEW_ROWS_MAX = 4, 48
"""Rows between which the transposed product is faster, read off benchmarks/linear.py."""


def speed_up_few_rows(module: torch.nn.Module) -> int:
    """Make every float32 linear layer on a CPU below `module` choose its product by the number of rows.

    Returns how many layers that were. Layers of a derived class may compute otherwise and are left alone.
    """
    layers = [
        layer
        for layer in module.modules()
        if type(layer) is torch.nn.Linear and layer.weight.device.type == "cpu" and layer.weight.dtype is torch.float32
    ]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


def _forward(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    num_rows = x.numel() // x.shape[-1]
    if not FEW_ROWS_MIN <= num_rows <= FEW_ROWS_MAX:
        return F.linear(x, layer.weight, layer.bias)
    product = torch.mm(layer.weight, x.reshape(num_rows, -1).t()).t()
    if layer.bias is not None:
        product = product + layer.bias
    return product.view(*x.shape[:-1], -1)
