"""Drive a stock causal language model over segments.

Four seams of the stock module are used: its attention function (registered as ``longstraw``, with
no mask function, so that no [S, T] mask is built), the forward of the causal-LM class (which takes
a walk instead of a cache), the forward of the output embedding (so that the log-prob head runs
where FSDP has the weight gathered), and the forward of each decoder layer (activation checkpointing
that keeps the walk, which Hugging Face's own drops).
What a call needs to know travels as the keyword ``longstraw``; nothing is hung on a global.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longstraw_backend.kernels.segment_attention import segment_attention
from longstraw_backend.state import Segment

from .families import check_supported

__all__ = ["ATTENTION", "DrivenModel", "Walk", "drive"]

ATTENTION = "longstraw"
Head = Callable[[Tensor, Tensor, Callable[..., Tensor]], tuple[Tensor, ...]]
"""From hidden states [B, T, D], output embedding [V, D] and its stock forward to what is wanted."""


@dataclass(frozen=True)
class Walk:
    """One call of the model: over which state, and what to return.

    Attributes:
        segment: state of all earlier tokens.
        commit: write the new tokens' keys and values to the segment (capture, decode) or leave the
            state as it is (score, replay).
        head: what to return; None returns nothing.
        checkpointing: recompute each decoder layer in the backward.
    """

    segment: Segment
    commit: bool
    head: Head | None
    checkpointing: bool = False


@dataclass(frozen=True)
class DrivenModel:
    """A causal LM that :func:`drive` prepared.

    Attributes:
        module: the outermost wrapper (peft, FSDP): the one to call.
        num_layers: decoder layers.
        device: where it computes, which need not be where its parameters rest.
    """

    module: nn.Module
    num_layers: int
    device: torch.device

    def segment(self, capacity: int, page_tokens: int) -> Segment:
        """An empty root segment."""
        return Segment(self.num_layers, capacity, page_tokens)


def drive(model: nn.Module) -> DrivenModel:
    """Prepare a stock ``...ForCausalLM`` for walks. Wrap it with peft and FSDP afterwards, and
    :func:`dataclasses.replace` the module with the wrapper and, if it moved, the device.

    Calls without a walk raise ValueError: the attention function can't serve them.

    Raises:
        ValueError: the family or one of its options is not supported.
    """
    stock: Any = model
    check_supported(stock.config)
    if getattr(stock.lm_head, "bias", None) is not None:
        raise ValueError("lm_head: an output embedding with a bias is not supported")
    stock.set_attn_implementation(ATTENTION)
    stock.forward = partial(_causal_lm_forward, model)
    stock.lm_head.forward = partial(_lm_head_forward, stock.lm_head, stock.lm_head.forward)
    for layer in stock.model.layers:
        layer.forward = partial(_layer_forward, layer.forward)
    device = next(model.parameters()).device
    return DrivenModel(model, stock.config.num_hidden_layers, device)


def _causal_lm_forward(
    model: Any, input_ids: Tensor, position_ids: Tensor, longstraw: Walk | None = None, **_: Any
) -> tuple[Tensor, ...]:
    if longstraw is None:
        raise ValueError(
            "this model is driven by longstraw: call it through longstraw_backend.walk.advance"
        )
    out = model.model(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, longstraw=longstraw
    )
    if longstraw.head is None:
        return ()
    result: tuple[Tensor, ...] = model.lm_head(out.last_hidden_state, longstraw.head)
    return result


def _lm_head_forward(
    lm_head: nn.Module, forward: Callable[..., Tensor], hidden: Tensor, head: Head
) -> tuple[Tensor, ...]:
    return head(hidden, lm_head.weight, forward)  # type: ignore[arg-type]


def _layer_forward(forward: Callable[..., Any], hidden: Tensor, **kwargs: Any) -> Any:
    walk: Walk = kwargs["longstraw"]
    if walk.checkpointing and torch.is_grad_enabled():
        return checkpoint(
            partial(forward, **kwargs), hidden, use_reentrant=False, preserve_rng_state=False
        )
    return forward(hidden, **kwargs)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    longstraw: Walk | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if longstraw is None or attention_mask is not None:
        raise ValueError(
            "attention 'longstraw': expected a walk and no mask; "
            "call longstraw_backend.walk.advance"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key, value = _common_dtype(query, key, value)
    out = segment_attention(query, key, value, longstraw.segment.resident(layer), scale=scaling)
    if longstraw.commit:
        longstraw.segment.write(layer, key, value)
    return out.transpose(1, 2), None


def _common_dtype(*tensors: Tensor) -> list[Tensor]:
    """Under autocast norms leave q and k wider than v; attention takes one dtype."""
    device = tensors[0].device.type
    dtype = (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensors[-1].dtype
    )
    return [t.to(dtype) for t in tensors]


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
