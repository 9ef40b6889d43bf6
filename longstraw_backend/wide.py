"""Float64 models that compute in float64, for comparisons below 1e-9."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["StaysWide", "compute_wide"]


class StaysWide(TorchFunctionMode):
    """Float64 tensors are not made float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            narrows = func in _CASTS and torch.float32 in (*args[1:], *options.values())
            if narrows or func is torch.Tensor.float:
                return args[0]
            if options.get("dtype") == torch.float32:  # of a softmax
                options = options | {"dtype": torch.float64}
        return func(*args, **options)


_CASTS = (torch.Tensor.to, torch.Tensor.type)


def compute_wide(model: Any) -> None:
    """Let norms and routers of a stock float64 model compute in float64.

    They compute in float32 whatever the model. Products of one token and of many then differ in the
    last bit, and gradients are rounded before or after they are summed: 1e-7 in either, which hides
    everything else. Grouped kernels of experts refuse float64 altogether.
    """
    routers = [m.gate for m in model.modules() if hasattr(m, "experts") and hasattr(m, "gate")]
    if routers:
        model.set_experts_implementation("eager")
    norms = [m for m in model.modules() if "RMSNorm" in type(m).__name__]
    for module in [*routers, *norms]:
        module.forward = partial(_wide, module.forward)


def _wide(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with StaysWide():
        return forward(*args, **kwargs)
