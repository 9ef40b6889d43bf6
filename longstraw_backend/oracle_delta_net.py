"""Gated-delta-net layers of the ordinary side: the stock module in one pass over all tokens.

What a prompt hands on through such a layer are the columns that the convolution of later tokens
reads, and the recurrent state at the boundary. With both constant,

    projection    its output for prompt tokens is detached
    delta rule    its inputs for prompt tokens are detached, hence the state at the boundary

Everything else is left to the stock module, but for one thing: where its rule is less exact than
the model, the definition of the rule runs, token by token. That is in float64, since the rule in
torch computes in float32 always, and in float32 on CUDA, where flash-linear-attention multiplies in
TF32 (log-probs of tiny models are off by 1e-2).

Legend: B rows, S tokens, N value heads, K and V head dims, C columns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["gated_delta_nets"]

Rule = Callable[..., tuple[Tensor, Tensor | None]]


@contextmanager
def gated_delta_nets(model: nn.Module, boundary: int | None) -> Iterator[None]:
    """Hold the first ``boundary`` tokens constant in the model's gated-delta-net layers, if it has
    any; None holds nothing constant. Float64 models compute in float64 in either case."""
    with ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, "A_log") and hasattr(module, "conv1d"):
                stack.enter_context(_prepared(module, boundary))
        yield


@contextmanager
def _prepared(mixer: Any, boundary: int | None) -> Iterator[None]:
    projection = mixer.in_proj_qkvz if hasattr(mixer, "in_proj_qkvz") else mixer.in_proj_qkv
    owner, name = _rule_of(mixer)
    stock = getattr(owner, name)
    hooks = [
        mixer.register_forward_pre_hook(_without_cache, with_kwargs=True),
        projection.register_forward_hook(lambda _, __, out: _cut(out, boundary)),
    ]
    setattr(owner, name, _cut_rule(stock, boundary))
    try:
        yield
    finally:
        setattr(owner, name, stock)
        for hook in hooks:
            hook.remove()


def _rule_of(mixer: Any) -> tuple[Any, str]:
    """Where the stock module finds its rule: on itself up to transformers 5.10, then globally."""
    if hasattr(mixer, "chunk_gated_delta_rule"):
        return mixer, "chunk_gated_delta_rule"
    return sys.modules[type(mixer).__module__], "torch_chunk_gated_delta_rule"


def _without_cache(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """All tokens come in one pass: nothing has to be kept, and the cache has no room for it."""
    return args, kwargs | {"cache_params": None}


def _cut(x_BS: Tensor, boundary: int | None) -> Tensor:
    if boundary is None:
        return x_BS
    return torch.cat([x_BS[:, :boundary].detach(), x_BS[:, boundary:]], dim=1)


def _cut_rule(stock: Rule, boundary: int | None) -> Rule:
    def rule(
        query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v, g, beta = (_cut(x, boundary) for x in (query, key, value, g, beta))
        if q.dtype == torch.float64 or (q.is_cuda and q.dtype == torch.float32):
            return _defining_rule(q, k, v, g, beta), None
        return stock(q, k, v, g=g, beta=beta, **options)

    return rule


def _defining_rule(
    q_BSNK: Tensor, k_BSNK: Tensor, v_BSNV: Tensor, g_BSN: Tensor, beta_BSN: Tensor
) -> Tensor:
    """Outputs [B, S, N, V] from a zero state (2412.06464), queries and keys normalised first."""
    groups = v_BSNV.shape[2] // q_BSNK.shape[2]
    q, k = (x.repeat_interleave(groups, dim=2) for x in (q_BSNK, k_BSNK))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state_BNKV = k.new_zeros(*k.shape[:1], *k.shape[2:], v_BSNV.shape[-1])
    outputs = []
    for t in range(k.shape[1]):
        state_BNKV = state_BNKV * g_BSN[:, t, :, None, None].exp()
        recalled = torch.einsum("bnkv,bnk->bnv", state_BNKV, k[:, t])
        change = (v_BSNV[:, t] - recalled) * beta_BSN[:, t, :, None]
        state_BNKV = state_BNKV + torch.einsum("bnk,bnv->bnkv", k[:, t], change)
        outputs.append(torch.einsum("bnkv,bnk->bnv", state_BNKV, q[:, t]))
    scale: float = k.shape[-1] ** -0.5
    return torch.stack(outputs, dim=1) * scale
