"""verl's settings of FSDP2, for parameters that ranks share in more ways than verl knows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from verl.utils.device import get_device_name
from verl.utils.fsdp_utils import apply_fsdp2, fsdp2_load_full_state_dict
from verl.utils.torch_dtypes import PrecisionType

from longstraw_backend.config import LongStrawConfig
from longstraw_backend.parallel import Layout
from longstraw_backend.parallel.layout import expert_ranks
from longstraw_backend.parallel.sharding import divide_gradients, shard_own_experts

__all__ = ["compute_dtype", "layout_of", "offloads", "sharded"]


def layout_of(model_config: Any, engine_config: Any, options: LongStrawConfig) -> Layout:
    """Lay out the ranks as the options say. Collective.

    Raises:
        ValueError: sizes that don't fit the ranks, the model or verl's ``fsdp_size``.
    """
    context, expert = options.context_parallel_size, options.expert_parallel_size
    adapted = bool(getattr(model_config, "target_parameters", None))
    if adapted and (expert or 1) > 1:
        raise ValueError(
            f"expert_parallel_size: expected 1 with adapters on target_parameters, got {expert}: "
            "they add to whole experts; use target_modules, or set it to 1"
        )
    text = model_config.hf_config.get_text_config()
    expert = expert_ranks(text, context, 1 if adapted else expert)
    shards = engine_config.fsdp_size
    if expert > 1 and shards not in (-1, dist.get_world_size()):
        raise ValueError(
            f"fsdp_size: expected -1 where {expert} ranks share experts, got {shards}: replicas of "
            "shards are not supported there; set it to -1 or expert_parallel_size to 1"
        )
    return Layout.of(get_device_name(), context, expert)


def sharded(module: nn.Module, engine_config: Any, layout: Layout, mesh: DeviceMesh) -> nn.Module:
    """Shard a module whose weights the first rank has loaded. Collective.

    Args:
        mesh: over which all but experts are sharded, of one dimension or with replicas.
    """
    policy = CPUOffloadPolicy(pin_memory=True) if offloads(engine_config) else None
    options: dict[str, Any] = dict(
        mp_policy=MixedPrecisionPolicy(
            param_dtype=compute_dtype(engine_config),
            reduce_dtype=_dtype(engine_config, "reduce_dtype", "fp32"),
            cast_forward_inputs=True,
        ),
        offload_policy=policy,
        reshard_after_forward=engine_config.reshard_after_forward,
    )
    whole = module.state_dict()
    shard_own_experts(module, layout, **options)
    apply_fsdp2(module, {"mesh": mesh, **options}, engine_config)
    fsdp2_load_full_state_dict(module, whole, mesh, policy)
    divide_gradients(module, layout, layout.data_size)
    return module


def offloads(engine_config: Any) -> bool:
    """Whether FSDP keeps parameters in pinned memory, which machines without a GPU don't have."""
    asked = engine_config.offload_policy or engine_config.forward_only
    return bool(asked) and get_device_name() != "cpu"


def compute_dtype(engine_config: Any) -> torch.dtype:
    """In which forwards and backwards run."""
    return _dtype(engine_config, "param_dtype", "bf16")


def _dtype(engine_config: Any, name: str, default: str) -> torch.dtype:
    dtype: torch.dtype = PrecisionType.to_dtype(
        (engine_config.mixed_precision or {}).get(name, default)
    )
    return dtype
