"""Parameters over ranks: FSDP2 over all of them, experts by owner first.

Every rank's gradients are partial sums over its own tokens, those of experts over the tokens of all
ranks that share experts. FSDP sums them over the shards of a parameter, all ranks or those with the
same experts, and divides by the number that it is told here: so each is summed over exactly its
replicas, once.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from .experts import fused_experts, shard_experts
from .layout import Layout

__all__ = ["divide_gradients", "shard", "shard_own_experts"]


def shard_own_experts(module: nn.Module, layout: Layout, **options: Any) -> None:
    """Leave each rank its experts, and shard them over the ranks that have the same ones.

    Before anything around them is sharded. Nothing happens if every rank has all experts.

    Args:
        options: of ``fully_shard``, without a mesh.
    """
    if layout.experts is None:
        return
    shard_experts(module, layout.experts["ep"], layout.sharers, layout.traffic)
    for _, experts in fused_experts(module):
        fully_shard(experts, mesh=layout.experts["efsdp"], **options)


def divide_gradients(module: nn.Module, layout: Layout, by: int) -> None:
    """Gradients are sums over ranks divided by so much: 1 where losses of ranks add up, the number
    of data-parallel ranks where each has been scaled by it."""
    experts = {id(e) for _, e in fused_experts(module)} if layout.experts else set()
    for part in module.modules():
        if not isinstance(part, FSDPModule):
            continue
        shards = layout.copies if id(part) in experts else layout.mesh.size()
        if shards == by:
            continue  # FSDP's mean is that already
        part.set_gradient_divide_factor(float(by))
        if shards > 1:  # not every backend has a scaled sum; a sum of one rank's is none
            part.set_force_sum_reduction_for_comms(True)


def shard(module: nn.Module, layout: Layout) -> nn.Module:
    """Shard a driven model, or a peft wrapper of one, layer by layer; losses of ranks add up.

    Every rank has the whole, equal parameters.
    """
    mesh = init_device_mesh(layout.mesh.device_type, (layout.mesh.size(),))
    shard_own_experts(module, layout)
    wrapped: Any = module
    inner = wrapped.get_base_model() if hasattr(module, "get_base_model") else wrapped
    for layer in inner.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    divide_gradients(module, layout, 1)
    return module
