"""Small tensors that decide which experts and which tokens are chosen stay float32.

    mlp.gate.e_score_correction_bias        added to a router's scores; published in float32
    self_attn.indexer.weights_proj.weight   weighs an indexer's heads; it never has a gradient

Casting a model, or the mixed precision of FSDP2, would round them, and with them the choice. So
both become buffers, which mixed precision leaves alone, and casts of their modules pass them by.
The router of such a bias, written in float32, computes in float32 under autocast too.
What was rounded before ``drive`` is read again by :func:`reload_float32`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .weights_on_disk import WeightsOnDisk

__all__ = ["keep_float32", "reload_float32"]

_BIAS, _INDEXER = "e_score_correction_bias", "indexer.weights_proj"


def keep_float32(model: nn.Module) -> None:
    """Make those tensors of a stock model float32 buffers that casts pass by.

    A float64 model keeps float64 for them; moves between devices take them along.
    """
    for module, attribute in list(_kept(model)):
        value: Tensor = getattr(module, attribute).detach()
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        delattr(module, attribute)
        module.register_buffer(attribute, wide)
        module._apply = partial(_apply, module, attribute, module._apply)  # type: ignore[method-assign]
        if attribute == _BIAS:
            module.forward = partial(_without_autocast, module.forward)


def reload_float32(model: nn.Module, checkpoint: Path) -> None:
    """Read the values of a driven model's float32 tensors anew from its checkpoint.

    For hosts that load in a narrower type. Does nothing where parameters have no storage yet.

    Args:
        checkpoint: folder with safetensors.

    Raises:
        ValueError: the checkpoint lacks one of them.
    """
    names = {id(module): name for name, module in model.named_modules()}
    weights = WeightsOnDisk(checkpoint)
    for module, attribute in _kept(model):
        name, value = f"{names[id(module)]}.{attribute}", getattr(module, attribute)
        if value.is_meta:
            continue
        if name not in weights.files:
            raise ValueError(f"checkpoint: {checkpoint} has no {name}; use the one that was loaded")
        value.copy_(weights.read(name))


def _kept(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for name, module in model.named_modules():
        if hasattr(module, _BIAS):
            yield module, _BIAS
        if name.endswith(_INDEXER):
            yield getattr(module, "base_layer", module), "weight"  # of an adapter


def _apply(
    module: nn.Module,
    attribute: str,
    apply: Callable[..., nn.Module],
    fn: Callable[[Tensor], Tensor],
    recurse: bool = True,
) -> nn.Module:
    before: Tensor = getattr(module, attribute)
    apply(fn, recurse)
    after: Tensor = getattr(module, attribute)
    if after.dtype != before.dtype and after.dtype in (torch.bfloat16, torch.float16):
        module.register_buffer(attribute, before.to(after.device))
    return module


def _without_autocast(
    forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any
) -> Any:
    with torch.autocast(hidden.device.type, enabled=False):
        return forward(hidden, *args, **kwargs)
