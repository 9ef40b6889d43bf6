"""Experts owned by rank: tokens travel to them and back, none is dropped.

Rank r of R has experts [r E/R, (r + 1) E/R) of each layer. Every rank calls the stock model with
its own tokens; where a block reaches its experts, each (token, expert) pair goes to the owner as a
row, and its output comes back to be weighted and summed where the token lives, in the order of its
top k. Sums over experts are thus the same on every split; what differs is which rows share a
matmul. Those of ranks with other prompts don't: with which of their blocks a block comes together
is not the same in scoring and in replay, and the number of rows is seen in the last bits.

Bytes that leave a rank in a layer's forward, b to an element, if every owner is chosen as often:

    2 k H b (R - 1) / R      a token: out and back
    8 E (R - 1) / R          a call: how many rows come

A backward moves the same rows again, no counts. A token that chooses several experts of one owner
goes there several times: sending it once would shorten the way out for k > 1, and is not done.

Refused: experts that are not fused as gate_up_proj [E, 2 I, H] and down_proj [E, H, I] (transposed
or interleaved ones, ones with biases or without a gate), and E that R doesn't divide. Calls are
collective, a rank without tokens calls too.

``sharding.py`` calls :func:`shard_experts` before FSDP wraps the rest, and leaves gradients of
experts out of the sum over these ranks: each is already the sum over all their tokens.
``Lockstep`` makes the calls of all ranks equally many.

Legend: N tokens of this rank, k experts of a token, S = N k rows, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from longstraw_backend.kernels.grouped_experts import grouped_experts

from .exchange import Ranks, all_to_all, deal
from .traffic import Traffic

__all__ = [
    "adapted_experts",
    "expert_parallel",
    "experts_of",
    "fused_experts",
    "owned_experts",
    "shard_experts",
]

ExpertsForward = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
_FUSED = "gate_up_proj", "down_proj"
_COUNTS = "num_experts", "n_routed_experts", "num_local_experts"


def owned_experts(num_experts: int, ranks: Ranks) -> range:
    """Which experts of a layer a rank has.

    Raises:
        ValueError: the ranks can't have equally many.
    """
    if num_experts % ranks.size:
        raise ValueError(
            f"expert parallel: expected a number of ranks that divides {num_experts} experts, "
            f"got {ranks.size}"
        )
    count = num_experts // ranks.size
    return range(ranks.rank * count, (ranks.rank + 1) * count)


def shard_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    sharing: Sequence[int] | None = None,
    traffic: Traffic | None = None,
) -> list[str]:
    """Leave this rank's share of all fused experts of a model, as DTensors sharded by expert, and
    have tokens travel to them.

    Without communication: every rank must have the whole, equal parameters (or all on ``meta``).

    Args:
        model: with stock experts; is changed.
        mesh: of one dimension, such as ``mesh["ep"]``.
        sharing: see :func:`expert_parallel`.
        traffic: counts what is sent; by default one of its own.

    Returns:
        Names of the parameters that were replaced.

    Raises:
        ValueError: the mesh has more dimensions, the model has no fused experts, or some that are
            refused; nothing is changed then.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}; pass mesh[name]")
    ranks = replace(Ranks.of(mesh.get_group()), traffic=traffic or Traffic())
    found = list(fused_experts(model))
    if not found:
        raise ValueError(
            f"model: expected fused experts, {type(model).__name__} has none; "
            "leave expert_parallel_size at 1"
        )
    for name, experts in found:
        _check_layout(name, experts)
        owned_experts(experts.num_experts, ranks)
    for _, experts in found:
        for kind in _FUSED:
            setattr(experts, kind, _share(getattr(experts, kind), mesh, ranks))
        experts.forward = MethodType(expert_parallel(ranks, sharing), experts)
    return [f"{name}.{kind}" for name, _ in found for kind in _FUSED]


def expert_parallel(ranks: Ranks, sharing: Sequence[int] | None = None) -> ExpertsForward:
    """A forward for stock experts modules that hold this rank's share.

    :func:`shard_experts` installs it; it also fits ``ALL_EXPERTS_FUNCTIONS`` of transformers.

    Args:
        sharing: how many of the ranks, in a row, share each prompt, R together; None: all do.

    Returns:
        A function of the module, hidden states [N, H], expert indices [N, k] and their weights
        [N, k]; N may differ among ranks. Its output [N, H] is differentiable in hidden states,
        weights and the parameters: plain tensors [E/R, ...], or DTensors sharded by expert, whose
        gradients are such DTensors. It raises ValueError for modules that are refused.
    """
    ranks = ranks.named("experts")

    def forward(
        experts: Any, hidden_NH: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        _check_layout(type(experts).__name__, experts)
        gate_up, down = (_local(experts, kind, ranks) for kind in _FUSED)
        route = _route(top_k_index, experts.num_experts, ranks, sharing or [ranks.size])
        rows = _arrange(hidden_NH, route.order, top_k_index.shape[-1])
        rows = deal(rows, route.sent, route.received, ranks)
        parts = rows.split([len(p.by_expert) for p in route.parts])
        outs = []
        for part, (by_expert, offsets) in zip(parts, route.parts, strict=True):
            part = _arrange(part, by_expert)
            out = grouped_experts(part, offsets, gate_up, down, gate=_gate_of(experts))
            outs.append(_arrange(out, _inverse(by_expert)))
        out = deal(torch.cat(outs), route.received, route.sent, ranks)
        pairs = _arrange(out, _inverse(route.order)).view(*top_k_index.shape, hidden_NH.shape[-1])
        return (pairs * top_k_weights[..., None]).sum(1).to(hidden_NH.dtype)

    return forward


class _Part(NamedTuple):
    """Rows from ranks that share a prompt, S'' of them.

    Attributes:
        by_expert: [S''], what arrives by rank, of each rank by expert, as all by expert.
        offsets: int32 [E/R], where an expert's rows end then.
    """

    by_expert: Tensor
    offsets: Tensor


class _Route(NamedTuple):
    """Where the rows of a call go.

    Attributes:
        order: [S], rows by expert; row s is of token s // k.
        sent: rows for each rank.
        received: rows from each rank.
        parts: of what is received, in order of rank.
    """

    order: Tensor
    sent: list[int]
    received: list[int]
    parts: list[_Part]


def _route(index_Nk: Tensor, num_experts: int, ranks: Ranks, sharing: Sequence[int]) -> _Route:
    own = len(owned_experts(num_experts, ranks))
    experts, order = index_Nk.flatten().sort(stable=True)
    counts_RE = torch.bincount(experts, minlength=num_experts).view(ranks.size, own)
    arriving_RE = all_to_all(counts_RE, ranks)
    sent, received = torch.stack([counts_RE.sum(1), arriving_RE.sum(1)]).tolist()
    parts, start = [], 0
    for counts in arriving_RE.split(list(sharing)):
        rows = sum(received[start : start + len(counts)])
        parts.append(_part(counts, rows))
        start += len(counts)
    return _Route(order, sent, received, parts)


def _part(counts_RE: Tensor, rows: int) -> _Part:
    """Of so many rows, counted by rank and expert."""
    local = torch.arange(counts_RE.shape[1], device=counts_RE.device).repeat(len(counts_RE))
    arrived = local.repeat_interleave(counts_RE.flatten(), output_size=rows)
    return _Part(arrived.argsort(stable=True), counts_RE.sum(0).cumsum(0, dtype=torch.int32))


class _Arrange(torch.autograd.Function):
    """A token's gradients are summed in the order of its top k, not as they happen to come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return x[order if copies == 1 else order // copies]

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        back = dx[_inverse(order)]
        if ctx.copies > 1:
            back = back.unflatten(0, (dx.shape[0] // ctx.copies, ctx.copies)).sum(1)
        return back, None, None


def _arrange(x: Tensor, order: Tensor, copies: int = 1) -> Tensor:
    """Rows [S, ...] in another order, out of ``copies`` of each of x [S / copies, ...]."""
    out: Tensor = _Arrange.apply(x, order, copies)
    return out


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _gate_of(experts: Any) -> Callable[[Tensor], Tensor]:
    """The module's own, which in some families clamps, else act(gate) * up."""
    if hasattr(experts, "_apply_gate"):
        return experts._apply_gate  # type: ignore[no-any-return]

    def gate(both: Tensor) -> Tensor:
        first, up = both.chunk(2, dim=-1)
        out: Tensor = experts.act_fn(first) * up
        return out

    return gate


def experts_of(config: Any) -> int:
    """Routed experts of a layer of a text model; 0 if it has none."""
    return next((n for name in _COUNTS if (n := getattr(config, name, None))), 0)


def fused_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules that hold all experts of a layer in one tensor a projection, by name."""
    for name, module in model.named_modules():
        weight = getattr(module, "down_proj", None)
        if isinstance(weight, Tensor) and weight.dim() == 3:
            yield name, module


def adapted_experts(model: nn.Module) -> bool:
    """Whether peft has put adapters on fused experts: they add to the experts of a whole layer."""
    return any(name.endswith("base_layer") for name, _ in fused_experts(model))


def _check_layout(name: str, experts: Any) -> None:
    flags = {
        "is_transposed": (False, "transposed weights"),
        "has_bias": (False, "biases"),
        "has_gate": (True, "no gate"),
        "is_concatenated": (True, "gate and up rows interleaved"),
    }
    found = [text for flag, (fine, text) in flags.items() if getattr(experts, flag, fine) != fine]
    found += [f"no {kind}" for kind in _FUSED if not hasattr(experts, kind)]
    if found:
        raise ValueError(
            f"{name}: expected experts with gate_up_proj [E, 2 I, H] and down_proj [E, H, I], "
            f"got {', '.join(found)}; leave expert_parallel_size at 1"
        )


def _share(weight: nn.Parameter, mesh: DeviceMesh, ranks: Ranks) -> nn.Parameter:
    # A copy: a view would keep all experts alive.
    own = weight.detach().chunk(ranks.size)[ranks.rank].clone()
    shared = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
    return nn.Parameter(shared, requires_grad=weight.requires_grad)


def _local(experts: Any, kind: str, ranks: Ranks) -> Tensor:
    weight: Tensor = getattr(experts, kind)
    if isinstance(weight, DTensor):
        if not weight.placements[-1].is_shard(0):
            raise ValueError(
                f"{kind}: expected a DTensor sharded along dim 0, got {weight.placements}; "
                "call shard_experts on the model"
            )
        weight = weight.to_local()
    expected = len(owned_experts(experts.num_experts, ranks))
    if weight.shape[0] != expected:
        raise ValueError(
            f"{kind}: expected the {expected} experts of this rank of {experts.num_experts}, "
            f"got {weight.shape[0]}; call shard_experts on the model"
        )
    return weight
