"""Tiny random layers of the latent-attention families, and walks over them in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig

from longstraw_backend.models.index_share import LayerKind, layer_kinds
from longstraw_backend.models.mla import MlaOutput, Rope, mla_attention
from longstraw_backend.models.mla_spec import MlaSpec, mla_spec
from longstraw_backend.tiny import options_of

__all__ = [
    "Layer",
    "make_layer",
    "parameter_grads",
    "randomise",
    "relative",
    "run_chunks",
]

_PREFIXES = {
    "glm_moe_dsa": "GlmMoeDsa",
    "deepseek_v32": "DeepseekV32",
    "deepseek_v3": "DeepseekV3",
}
_ONE_LAYER: dict[str, Any] = dict(
    hidden_size=48,
    num_attention_heads=3,
    num_key_value_heads=3,
    num_hidden_layers=2,
    index_topk_freq=1,
)


@dataclass(frozen=True)
class Layer:
    """A stock attention module, its sizes and its rotary embedding."""

    attn: Any
    spec: MlaSpec
    kind: LayerKind
    rotary: Any

    def rope(self, start: int, stop: int, like: Tensor) -> Rope:
        return Rope(*self.rotary(like, torch.arange(start, stop)[None]))


def make_layer(
    family: str, dtype: torch.dtype = torch.float64, seed: int = 0, index: int = 0, **options: Any
) -> Layer:
    """A random layer; transformers before 5.11 has no deepseek_v32, GLM's module stands in."""
    torch.manual_seed(seed)
    stand_in = family == "deepseek_v32" and family not in CONFIG_MAPPING
    name = "glm_moe_dsa" if stand_in else family
    config = AutoConfig.for_model(name, **(options_of(family) | _ONE_LAYER | options))
    config._attn_implementation = "sdpa"
    stock, prefix = import_module(f"transformers.models.{name}.modeling_{name}"), _PREFIXES[name]
    attn: nn.Module = getattr(stock, f"{prefix}Attention")(config, index)
    rotary: nn.Module = getattr(stock, f"{prefix}RotaryEmbedding")(config)
    randomise(attn)
    spec = mla_spec(config)
    if stand_in:
        assert spec.index is not None
        spec = replace(spec, index=replace(spec.index, interleaved=False))
    return Layer(attn.to(dtype), spec, layer_kinds(config)[index], rotary)


def randomise(module: nn.Module) -> None:
    """Norms leave their ones and zeros, so that nothing is tested at a neutral value only."""
    for name, parameter in module.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, mean=float("bias" not in name), std=0.3)


def run_chunks(
    layer: Layer,
    hidden: Tensor,
    sizes: Sequence[int],
    selection: Tensor | None = None,
    kind: LayerKind | None = None,
) -> list[MlaOutput]:
    """Outputs of the chunks of ``hidden`` [B, S, D], each over the state left by those before."""
    latents: list[Tensor] = []
    keys: list[Tensor] = []
    outs: list[MlaOutput] = []
    start = 0
    for size in sizes:
        stop = start + size
        out = mla_attention(
            layer.attn,
            layer.spec,
            kind or layer.kind,
            hidden[:, start:stop],
            layer.rope(start, stop, hidden),
            latents,
            keys,
            None if selection is None else selection[:, start:stop],
        )
        outs.append(out)
        latents.append(out.latents.detach())
        if out.index_keys is not None:
            keys.append(out.index_keys)
        start = stop
    return outs


def parameter_grads(attn: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Of every parameter that has one; the indexer's must not."""
    named = dict(attn.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    found = {n: g for n, g in zip(named, grads, strict=True) if g is not None}
    assert not any("indexer" in name for name in found)
    return found


def relative(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance of a from b."""
    return ((a - b).norm() / b.norm()).item()
