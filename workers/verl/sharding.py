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
from longstraw_backend.parallel.experts import adapted_experts
from longstraw_backend.parallel.layout import expert_ranks
from longstraw_backend.parallel.sharding import divide_gradients, shard_own_experts

__all__ = ["compute_dtype", "offloads", "sharded", "sharing_experts"]


def sharing_experts(
    layout: Layout, module: nn.Module, engine_config: Any, options: LongStrawConfig
) -> Layout:
    """The layout with the model's experts over as many ranks as the options say. Collective.

    Raises:
        ValueError: a size that doesn't fit the ranks, the model, its adapters or ``fsdp_size``.
    """
    config: Any = module.config
    asked = options.expert_parallel_size
    if adapted_experts(module):
        if asked is not None and asked > 1:
            raise ValueError(
                f"expert_parallel_size: expected 1 with adapters on experts, got {asked}; set it "
                "to 1, or list target_modules without experts (all-linear takes them in)"
            )
        asked = 1
    shared = expert_ranks(config, options.context_parallel_size, asked)
    shards = engine_config.fsdp_size
    if shared > 1 and shards not in (-1, dist.get_world_size()):
        raise ValueError(
            f"fsdp_size: expected -1 where {shared} ranks share experts, got {shards}: replicas of "
            "shards are not supported there; set it to -1 or expert_parallel_size to 1"
        )
    return layout.sharing(shared)


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
