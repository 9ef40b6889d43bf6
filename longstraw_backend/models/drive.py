"""Drive a stock causal language model over segments.

Seams of the stock module: its attention function (``attention.py``), the forward of mixers that
can't be driven as they are (``families.py`` says which), the forward of the causal-LM class (which
takes a walk instead of a cache), the forward of the output embedding (so that the log-prob head
runs where FSDP has the weight gathered), and the forward of each decoder layer (activation
checkpointing that keeps the walk, which Hugging Face's own drops).
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

from longstraw_backend.parallel.exchange import Ranks
from longstraw_backend.state import ON_DEVICE, NewLayerState, Placement, Segment

from .attention import ATTENTION
from .context import Head, Walk
from .families import check_supported, mixers_of
from .float32 import keep_float32

__all__ = ["DrivenModel", "drive"]


@dataclass(frozen=True)
class DrivenModel:
    """A causal LM that :func:`drive` prepared.

    Attributes:
        module: the outermost wrapper (peft, FSDP): the one to call.
        new_states: one a decoder layer: makes the state that the layer leaves in a segment.
        device: where it computes, which need not be where its parameters rest.
        ranks: this rank among those that share each prompt.
    """

    module: nn.Module
    new_states: tuple[NewLayerState, ...]
    device: torch.device
    ranks: Ranks = Ranks()

    def segment(
        self,
        capacity: int,
        page_tokens: int,
        placement: Placement = ON_DEVICE,
        cotangents: torch.dtype | None = None,
        own: int | None = None,
    ) -> Segment:
        """An empty root segment, whose state rests where ``placement`` says; with ``cotangents`` it
        can be walked in reverse. At most ``own`` of its tokens, by default all, are on this rank.
        """
        room = capacity if own is None else own
        layers = [new(room, page_tokens, placement) for new in self.new_states]
        return Segment(layers, capacity, staging=placement.staging, cotangents=cotangents)


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
    keep_float32(model)
    mixers = mixers_of(stock.config)
    for layer, mixer in zip(stock.model.layers, mixers, strict=True):
        mixer.install(layer)
        layer.forward = partial(_layer_forward, layer.forward)
    device = next(model.parameters()).device
    return DrivenModel(model, tuple(mixer.state for mixer in mixers), device)


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
        return (out.last_hidden_state,) if longstraw.reverse else ()
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
