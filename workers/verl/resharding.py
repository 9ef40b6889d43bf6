"""Checkpoints of verl's FSDP engine put into a model and optimizer sharded over other ranks.

Each rank gets what all ranks saved, in mapped memory, and copies out of it what overlaps its own
shards: no tensor is whole in memory, and nothing is communicated. Refused: partial sums, optimizer
state that is neither of its parameter's shape nor a scalar.

spans: where a shard lies in its whole tensor, (start, stop) a tensor dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["copy_shards", "load_model", "load_optimizer", "shard_spans", "sharding_of"]

Spans = tuple[tuple[int, int], ...]


def shard_spans(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Spans:
    """Where the shard at a coordinate of a mesh lies in the whole tensor.

    Mesh axes cut in their order, each part as ``torch.chunk`` does; those of ``_StridedShard``
    cut last and in reverse, as FSDP2 does over tensor or expert parallelism.

    Raises:
        ValueError: another placement, or a split factor that is not of that order.
    """
    plain = [i for i, p in enumerate(placements) if type(p) is Shard]
    strided = [i for i, p in enumerate(placements) if isinstance(p, _StridedShard)]
    replicated = [i for i, p in enumerate(placements) if isinstance(p, Replicate)]
    cutting = {i: placements[i].dim for i in plain + strided}  # type: ignore[attr-defined]
    factors = {
        i: math.prod(mesh_shape[j] for j, dim in cutting.items() if j > i and dim == cutting[i])
        for i in strided
    }
    if len(cutting) + len(replicated) < len(placements) or any(
        placements[i].split_factor != factor  # type: ignore[attr-defined]
        for i, factor in factors.items()
    ):
        raise ValueError(
            f"placements: {tuple(placements)} on a mesh of {tuple(mesh_shape)}; expected Replicate,"
            " Shard, or _StridedShard by the axes after it; resume on the saved number of ranks"
        )
    spans = [(0, size) for size in shape]
    for axis in plain + strided[::-1]:
        start, stop = spans[cutting[axis]]
        step = math.ceil((stop - start) / mesh_shape[axis])
        first = min(start + step * coordinate[axis], stop)
        spans[cutting[axis]] = first, min(first + step, stop)
    return tuple(spans)


def sharding_of(tensor: Tensor) -> Any:
    """What two tensors must have in common for their shards to be the same parts."""
    if not isinstance(tensor, DTensor):
        return None
    return tuple(tensor.device_mesh.shape), tuple(tensor.placements)


def _own(tensor: Tensor) -> tuple[Spans, Tensor]:
    """Spans and values of this rank's shard, or of the rank that saved it."""
    if not isinstance(tensor, DTensor):
        return tuple((0, size) for size in tensor.shape), tensor.detach()
    mesh, local = tensor.device_mesh, tensor.to_local().detach()
    coordinate = mesh.get_coordinate()  # of a loaded tensor: of the rank that saved it
    assert coordinate is not None, "a shard lies on its mesh"
    return shard_spans(tensor.shape, tensor.placements, mesh.shape, coordinate), local


def _check(name: str, target: Tensor, shards: Sequence[Tensor]) -> None:
    wrong = [s.shape for s in shards if s.shape != target.shape]
    if wrong:
        raise ValueError(
            f"checkpoint: {name} has shape {tuple(wrong[0])}, expected {tuple(target.shape)} as in "
            "the model; resume with the model that was saved"
        )
    parts = dict(map(_own, shards))
    sizes = [(math.prod(b - a for a, b in spans), part.numel()) for spans, part in parts.items()]
    if any(own != held for own, held in sizes) or sum(own for own, _ in sizes) != target.numel():
        held = sum(held for _, held in sizes)
        raise ValueError(
            f"checkpoint: shards of {name} have {held} of {target.numel()} elements; their files "
            "are not of one save, resume another step"
        )


@torch.no_grad()
def copy_shards(target: Tensor, shards: Sequence[Tensor]) -> None:
    """Write saved values into this rank's part of a tensor.

    Args:
        target: a DTensor or not, on any device; changed in place.
        shards: the same tensor as each saved rank had it; together they have all of it.
    """
    own, into = _own(target)
    for spans, part in dict(map(_own, shards)).items():
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(own, spans, strict=True)]
        if all(start < stop for start, stop in both):
            _slice(into, own, both).copy_(_slice(part, spans, both))


def _slice(local: Tensor, spans: Spans, wanted: Sequence[tuple[int, int]]) -> Tensor:
    at = zip(spans, wanted, strict=True)
    return local[tuple(slice(start - own, stop - own) for (own, _), (start, stop) in at)]


def load_model(model: nn.Module, shards: Sequence[Mapping[str, Tensor]], *, partial: bool) -> None:
    """Give a model its saved weights and buffers.

    Args:
        shards: the state dict of each saved rank.
        partial: weights that were not saved are kept.

    Raises:
        ValueError: names or shapes differ; nothing is changed.
    """
    live = model.state_dict()
    for saved in shards:
        wrong = saved.keys() - live.keys() if partial else saved.keys() ^ live.keys()
        wrong |= saved.keys() ^ shards[0].keys()
        if wrong:
            raise ValueError(
                f"checkpoint: {min(wrong)} is not in the model and in every shard ({len(wrong)} "
                "such); resume with the model and LoRA settings that were saved"
            )
    by_name = {name: [saved[name] for saved in shards] for name in shards[0]}
    for name, tensors in by_name.items():
        _check(name, live[name], tensors)
    for name, tensors in by_name.items():
        copy_shards(live[name], tensors)


def load_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], shards: Sequence[Any]
) -> None:
    """Give an optimizer its saved state.

    Args:
        names: of its parameters.
        shards: the optimizer's state dict of each saved rank: by the place of a parameter, which
            is the same with any number of ranks.

    Raises:
        ValueError: parameters or shapes differ; nothing is changed.
    """
    groups = shards[0]["param_groups"]
    counts = [len(group["params"]) for group in groups]
    if counts != (own := [len(group["params"]) for group in optimizer.param_groups]):
        raise ValueError(
            f"checkpoint: the optimizer has {counts} parameters, expected {own}; resume with the "
            "model and LoRA settings that were saved"
        )
    places = [place for group in groups for place in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    collected = [
        (place, key, parameter, _values(shards, place, key, names[parameter]))
        for place, parameter in zip(places, parameters, strict=True)
        for key in shards[0]["state"].get(place, {})
    ]
    for _, key, parameter, values in collected:
        if isinstance(values[0], Tensor) and values[0].ndim:
            _check(f"optimizer state {key} of {names[parameter]}", parameter, values)
    state: dict[Any, dict[str, Any]] = {}
    for place, key, parameter, values in collected:
        state.setdefault(place, {})[key] = _assembled(parameter, values)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _values(shards: Sequence[Any], place: int, key: str, name: str) -> list[Any]:
    try:
        return [saved["state"][place][key] for saved in shards]
    except KeyError as error:
        raise ValueError(
            f"checkpoint: not every shard has optimizer state {key} of {name}; their files are not "
            "of one save, resume another step"
        ) from error


def _assembled(parameter: Tensor, values: Sequence[Any]) -> Any:
    """A parameter's state of its own sharding; a scalar as the first rank saved it."""
    first = values[0]
    if not isinstance(first, Tensor):
        return first
    if not first.ndim:
        return first.clone()
    target = torch.empty_like(parameter.detach(), dtype=first.dtype)
    copy_shards(target, values)
    return target
