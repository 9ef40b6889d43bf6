"""Which model families are supported: what each of their layers needs, and what is refused by name.

A family is a set of Hugging Face model types whose layers mix tokens in the same ways. To add one,
write its mixers (state, and what of the stock module is replaced) and list it in ``FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from longstraw_backend.state import KVPages, LatentPages, NewLayerState, RecurrentState

from . import gated_delta_net, mla_forward
from .index_share import layer_kinds

__all__ = [
    "FAMILIES",
    "SUPPORTED",
    "Family",
    "Mixer",
    "check_no_dropout",
    "check_routers",
    "check_supported",
    "family_name",
    "layer_types_of",
    "mixers_of",
    "text_model_type",
]


@dataclass(frozen=True)
class Mixer:
    """How one type of layer is driven.

    Attributes:
        state: makes what a segment holds for such a layer.
        install: replaces, in one decoder layer, what can't be driven as it is.
    """

    state: NewLayerState
    install: Callable[[Any], None] = lambda decoder_layer: None


def _layer_types(config: Any) -> Sequence[str]:
    """The names that transformers itself has for them."""
    types: Sequence[str] | None = getattr(config, "layer_types", None)
    return types or ["full_attention"] * config.num_hidden_layers


@dataclass(frozen=True)
class Family:
    """Model types that are driven alike.

    Attributes:
        model_types: by the name we and ``AutoConfig`` give a family, the ``model_type`` of its text
            model's configuration.
        mixers: by type of layer.
        layer_types: from a configuration to the type of each layer.
    """

    model_types: Mapping[str, str]
    mixers: Mapping[str, Mixer]
    layer_types: Callable[[Any], Sequence[str]] = _layer_types


_ATTENTION = Mixer(KVPages)
_GATED_DELTA_NET = Mixer(RecurrentState, gated_delta_net.install)
_LATENT_ATTENTION = Mixer(LatentPages, mla_forward.install)

FAMILIES = (
    Family(
        {name: name for name in ("llama", "qwen2", "qwen3", "qwen3_moe")},
        {"full_attention": _ATTENTION},
    ),
    Family(
        {
            "qwen3_5": "qwen3_5_text",
            "qwen3_5_moe": "qwen3_5_moe_text",
            "qwen3_next": "qwen3_next",
        },
        {"full_attention": _ATTENTION, "linear_attention": _GATED_DELTA_NET},
    ),
    Family(
        {name: name for name in ("glm_moe_dsa", "deepseek_v32", "deepseek_v3")},
        dict.fromkeys(("dense", "full", "shared"), _LATENT_ATTENTION),
        layer_kinds,
    ),
)
SUPPORTED = tuple(name for family in FAMILIES for name in family.model_types)
"""The names of all supported model types."""


def family_name(config: Any) -> str:
    """The name of a text model's family, one of ``SUPPORTED``.

    Raises:
        ValueError: it is not supported, or holds more than a text model.
    """
    kind = getattr(config, "model_type", None)
    for family in FAMILIES:
        for name, text_type in family.model_types.items():
            if kind == text_type:
                return name
            if kind == name:
                raise ValueError(
                    f"model_type: {kind!r} with a vision tower is not supported, prompts are "
                    "text; load the checkpoint with AutoModelForCausalLM: it takes the text model"
                )
    raise ValueError(f"model_type: {kind!r} is not supported; supported are {', '.join(SUPPORTED)}")


def text_model_type(name: str) -> str:
    """The ``model_type`` of the text model of a family, one of ``SUPPORTED``."""
    return next(f.model_types[name] for f in FAMILIES if name in f.model_types)


def layer_types_of(config: Any) -> Sequence[str]:
    """The type of each layer, by which its family lists mixers.

    Raises:
        ValueError: the family is not supported.
    """
    return _family(config).layer_types(config)


def mixers_of(config: Any) -> list[Mixer]:
    """The mixer of each layer.

    Raises:
        ValueError: the family, or one of its layers, is not supported.
    """
    name, family = family_name(config), _family(config)
    known, types = family.mixers, family.layer_types(config)
    unknown = ", ".join(sorted(set(types) - known.keys()))
    if unknown or getattr(config, "use_sliding_window", False):
        found = unknown or "use_sliding_window=True"
        raise ValueError(
            f"layer_types: only {' and '.join(known)} is supported for {name}, got {found}"
        )
    return [known[kind] for kind in types]


def _family(config: Any) -> Family:
    name = family_name(config)
    return next(f for f in FAMILIES if name in f.model_types)


def check_supported(config: Any) -> None:
    """Raise ValueError, naming the option, for a model we would compute wrongly.

    Args:
        config: the Hugging Face configuration of the text model.
    """
    mixers_of(config)
    if getattr(config, "attention_dropout", 0.0):
        raise ValueError(
            f"attention_dropout: {config.attention_dropout} is not supported, scoring and replay "
            "could not agree; set it to 0"
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "output_router_logits: the router's auxiliary loss needs logits of prompt tokens, "
            "which are not kept; set it to False"
        )


def check_no_dropout(module: nn.Module) -> None:
    """Raise ValueError for a dropout layer (an adapter's, say): scores and replays would differ."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Dropout) and child.p > 0:
            raise ValueError(
                f"dropout: {name} has p={child.p}; scoring and replay could not agree, set it to 0"
            )


def check_routers(module: nn.Module) -> None:
    """Raise ValueError for an adapter on a router that hides the correction bias the stock block
    reads there (peft 0.21 puts one on with ``all-linear``)."""
    for name, child in module.named_modules():
        base = getattr(child, "base_layer", None)
        if hasattr(base, "e_score_correction_bias") and not hasattr(
            child, "e_score_correction_bias"
        ):
            raise ValueError(
                f"target_modules: an adapter on the router {name} is not supported; list the "
                "layers by name, without gate, instead of all-linear"
            )
