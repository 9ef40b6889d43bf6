"""Settings of verl: which this engine refuses rather than ignores, and how it changes some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.utils.torch_dtypes import PrecisionType

__all__ = ["overridden", "refuse_settings"]

_REFUSED = {
    "ulysses_sequence_parallel_size": 1,
    "pad_to_length": False,
}


def refuse_settings(model_config: Any, engine_config: Any) -> None:
    """Raise ValueError, naming the setting, for what would be ignored or computed wrongly."""
    for name, only in _REFUSED.items():
        value = getattr(engine_config, name, only)
        if value != only:
            raise ValueError(f"{name}: strategy longstraw supports {only}, got {value}")
    dtype = (getattr(engine_config, "mixed_precision", None) or {}).get("param_dtype", "bf16")
    if PrecisionType.to_dtype(dtype) == torch.float16:
        raise ValueError(
            f"mixed_precision.param_dtype: strategy longstraw does not scale losses, which {dtype} "
            "needs; set it to bf16 or fp32"
        )
    if getattr(model_config, "enable_activation_offload", False):
        raise ValueError(
            "enable_activation_offload: not supported by strategy longstraw; set it to False"
        )
    if getattr(getattr(model_config, "mtp", None), "enable", False):
        raise ValueError(
            "mtp.enable: training the MTP layer is not supported by strategy longstraw, its "
            "weights are kept as they are; set it to False"
        )
    if getattr(model_config, "use_fused_kernels", False):
        raise ValueError(
            "use_fused_kernels: strategy longstraw has its own log-prob head; set it to False"
        )


@contextmanager
def overridden(config: Any, **values: Any) -> Iterator[None]:
    """Frozen configuration values that the parent class reads, replaced for a while."""
    before = {name: getattr(config, name) for name in values}
    for name, value in values.items():
        object.__setattr__(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(config, name, value)
