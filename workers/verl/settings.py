"""Settings of verl: which this engine refuses rather than ignores, and how it changes some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from longstraw_backend.config import LongStrawConfig

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
    options = getattr(engine_config, "longstraw", None) or LongStrawConfig()
    for name in ("context_parallel_size", "expert_parallel_size"):
        value = getattr(options, name)
        if value > 1:
            raise ValueError(f"{name}: {value} is not built yet in this version; set it to 1")
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
