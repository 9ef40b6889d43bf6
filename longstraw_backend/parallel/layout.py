"""How the ranks of a run are laid out: data, context and expert parallel.

    rank = data rank x C + context rank        C ranks in a row share prompts
    rank = expert copy x E + expert rank       E ranks in a row share experts; E divides D C

Parameters and optimizer state are sharded over all D C ranks, those of experts over the ranks that
have the same ones, D C / E of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .exchange import Ranks
from .experts import experts_of
from .traffic import Traffic

__all__ = ["Layout", "expert_ranks"]


@dataclass(frozen=True)
class Layout:
    """This rank's place among all.

    Attributes:
        mesh: all ranks, [dp, cp].
        experts: all ranks again, [copies of an expert, ep]; None if each rank has all experts.
        traffic: what this rank sends to those it shares prompts or experts with.
    """

    mesh: DeviceMesh
    experts: DeviceMesh | None = None
    traffic: Traffic = field(default_factory=Traffic)

    @classmethod
    def of(cls, device: str, context: int = 1, expert: int = 1) -> Layout:
        """Lay out the ranks of the default process group. Collective.

        Args:
            device: type of the device that communicates.
            context: ranks that share a prompt.
            expert: ranks that share the experts of a layer.

        Raises:
            ValueError: a size doesn't divide the number of ranks; before any communication.
        """
        world = _divided_by("context_parallel_size", context)
        _divided_by("expert_parallel_size", expert)
        shape = world // context, context
        return cls(init_device_mesh(device, shape, mesh_dim_names=("dp", "cp"))).sharing(expert)

    def sharing(self, expert: int) -> Layout:
        """The same with experts shared by so many ranks. Collective; raises as :meth:`of`."""
        world = _divided_by("expert_parallel_size", expert)
        if expert == 1:
            return replace(self, experts=None)
        shape = world // expert, expert
        experts = init_device_mesh(self.mesh.device_type, shape, mesh_dim_names=("efsdp", "ep"))
        experts._flatten("all_experts")  # one reduction over both dimensions instead of two
        return replace(self, experts=experts)

    @property
    def ranks(self) -> Ranks:
        """Those that share a prompt."""
        return replace(Ranks.of(self.mesh.get_group("cp")), traffic=self.traffic)

    @property
    def data_group(self) -> dist.ProcessGroup:
        """One rank of each group that shares prompts: together they have the whole batch."""
        return self.mesh.get_group("dp")

    @property
    def data_rank(self) -> int:
        """Which part of the batch is this rank's."""
        return self.mesh.get_local_rank("dp")

    @property
    def data_size(self) -> int:
        """Parts of the batch."""
        return self.mesh.size(0)

    @property
    def copies(self) -> int:
        """Ranks that have the same experts."""
        return self.mesh.size() if self.experts is None else self.experts.size(0)

    @property
    def sharers(self) -> list[int]:
        """Of the ranks that share experts with this one, in a row: how many share each prompt."""
        if self.experts is None:
            return [1]
        first = self.experts.get_local_rank("efsdp") * self.experts.size(1)
        prompts = [(first + i) // self.mesh.size(1) for i in range(self.experts.size(1))]
        return list(Counter(prompts).values())

    @property
    def collects(self) -> bool:
        """Whether this rank speaks for those that share its prompts."""
        return self.mesh.get_local_rank("cp") == 0


def _divided_by(name: str, size: int) -> int:
    world = dist.get_world_size()
    if size < 1 or world % size:
        raise ValueError(f"{name}: expected a divisor of the number of ranks, {world}, got {size}")
    return world


def expert_ranks(config: Any, context: int, expert: int | None) -> int:
    """How many ranks share the experts of a model.

    Args:
        config: of the text model.
        context: ranks that share a prompt.
        expert: as asked for; None takes as many of the ranks that share a prompt as divide the
            number of experts.

    Raises:
        ValueError: the model has no experts, or they can't be shared out evenly.
    """
    experts = experts_of(config)
    if expert is None:
        return gcd(context, experts) if experts else 1
    if expert > 1 and (experts == 0 or experts % expert):
        raise ValueError(
            f"expert_parallel_size: expected a divisor of the model's {experts} experts, got "
            f"{expert}; set it to 1 or leave it out"
        )
    return expert
