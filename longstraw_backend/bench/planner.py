"""Bytes that a capture and a replay take, before they run, and the longest prompt that fits.

    weights      parameters, and adapters
    trained      gradients and, for a step, AdamW's two moments, of what is trained
    state        of the prompt; what rests in CPU memory is told apart
    cotangents   with ``exact``
    block        the activations of one chunk or one response (``activations.py``)

Only state and its cotangents grow with the prompt.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from longstraw_backend.models.families import layer_types_of
from longstraw_backend.models.mla_spec import mla_spec
from longstraw_backend.models.sizes import ModelSizes, head_width
from longstraw_backend.state.placement import StateKind

from .activations import WIDE, fixed_bytes, head_bytes, layer_bytes
from .settings import Settings

__all__ = ["Plan", "StateBytes", "largest_context", "plan_of", "state_of_layer"]

_ANY = 1 << 40
"""Tokens of a prompt that is longer than any."""


@dataclass(frozen=True)
class StateBytes:
    """Of one layer.

    Attributes:
        kind: of state.
        token: for each token of the prompt.
        prompt: whatever its length, at one boundary.
        cotangent: of a token's state.
    """

    kind: StateKind
    token: int = 0
    prompt: int = 0
    cotangent: int = 0


@dataclass(frozen=True)
class Plan:
    """Predicted bytes on the device, but for ``host``.

    Attributes:
        weights, gradients, optimizer: of the model.
        state, cotangents: of the prompt.
        host: state and cotangents in CPU memory.
        capture, score, replay: activations of a chunk and of a response.
        reverse: those of a prompt's chunk in reverse, with ``exact``.
    """

    weights: int
    gradients: int
    optimizer: int
    state: int
    cotangents: int
    host: int
    capture: int
    score: int
    replay: int
    reverse: int

    def peak(self, phase: str) -> int:
        """Of ``capture``, ``score``, ``replay`` or ``step``, all before it left alive."""
        held = self.weights + self.state
        if phase in ("capture", "score"):
            return held + int(getattr(self, phase))
        trained = held + self.gradients + self.cotangents
        if phase == "replay":
            return trained + self.replay
        most = max(trained + self.replay, trained + self.reverse, self.peak("capture"))
        return max(most, self.peak("score"), trained + self.optimizer)

    def as_json(self) -> dict[str, int]:
        """Parts and peaks."""
        peaks = {f"peak_{p}": self.peak(p) for p in ("capture", "score", "replay", "step")}
        return asdict(self) | peaks


def plan_of(config: Any, sizes: ModelSizes, settings: Settings, context: int) -> Plan:
    """For a prompt of which so many tokens are captured.

    Args:
        config: Hugging Face text configuration of the shape.
    """
    element = _element(settings)
    adapters = settings.lora * sum(layer.edges + layer.index_edges for layer in sizes.layers) * WIDE
    trained = adapters if settings.lora else sizes.parameters * element
    layers = [state_of_layer(config, kind, element) for kind in layer_types_of(config)]
    here = [layer for layer in layers if layer.kind not in settings.offload]
    away = [layer for layer in layers if layer.kind in settings.offload]
    state, cotangents = _state(here, settings, context)
    blocks = _Blocks(config, sizes, settings, context)
    return Plan(
        sizes.parameters * element + adapters,
        trained,
        2 * trained,
        state,
        cotangents,
        sum(_state(away, settings, context)),
        blocks.capture(),
        blocks.score(),
        blocks.replay(settings.response, head=True),
        blocks.replay(settings.chunk, head=False) if settings.gradient == "exact" else 0,
    )


def largest_context(config: Any, sizes: ModelSizes, settings: Settings, phase: str) -> int | None:
    """The longest prompt whose predicted peak stays within the budget, to a chunk; 0 if none does,
    None if all do because what grows with the prompt rests in CPU memory."""
    budget = settings.budget_gb * 2**30

    def fits(chunks: int) -> bool:
        plan = plan_of(config, sizes, settings, chunks * settings.chunk)
        return plan.peak(phase) <= budget

    if not fits(1):
        return 0
    least, most = 1, 2
    while fits(most):
        least, most = most, 2 * most
        if most * settings.chunk > _ANY:
            return None
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least * settings.chunk


def state_of_layer(config: Any, kind: str, element: int) -> StateBytes:
    """What one layer keeps."""
    if kind == "full_attention":
        values = 2 * config.num_key_value_heads * head_width(config)
        return StateBytes("attention", values * element, cotangent=values * WIDE)
    if kind == "linear_attention":
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
        columns = (2 * groups * key + heads * value) * (config.linear_conv_kernel_dim - 1)
        return StateBytes("recurrent", prompt=columns * element + heads * key * value * WIDE)
    spec = mla_spec(config)
    latent = spec.latent + spec.rope
    index = spec.index.dim if kind == "full" and spec.index else 0
    return StateBytes("latent", (latent + index) * element, cotangent=latent * WIDE)


def _element(settings: Settings) -> int:
    return int(getattr(torch, str(settings.dtype)).itemsize)


def _state(layers: list[StateBytes], settings: Settings, context: int) -> tuple[int, int]:
    """State, with what is being written of recurrent layers, and cotangents."""
    exact = settings.gradient == "exact"
    boundaries = -(-context // settings.chunk) if exact else 1
    state = sum(s.token * context + s.prompt * (boundaries + 1) for s in layers)
    return state, sum(s.cotangent * context + 2 * s.prompt for s in layers) if exact else 0


class _Blocks:
    """Activations of blocks over a prompt of ``context`` tokens."""

    def __init__(self, config: Any, sizes: ModelSizes, settings: Settings, context: int) -> None:
        self.config, self.sizes, self.settings = config, sizes, settings
        self.element = _element(settings)
        self.layers = layer_bytes(
            config,
            sizes,
            element=self.element,
            lora=settings.lora,
            fused_rule=settings.device == "cuda" and self.element < WIDE,
        )
        self.context, self.away = context, _brought_over(config, settings, context)

    def capture(self) -> int:
        """Of a chunk."""
        return self._forward(self.settings.chunk)

    def score(self) -> int:
        """Of a response."""
        tokens = self.settings.response
        return max(self._forward(tokens), self._head(tokens))

    def replay(self, tokens: int, *, head: bool) -> int:
        """Of a block with its graph: what all layers keep for recomputation and one layer's graph,
        or all graphs; at the end of the forward, logits."""
        kept = tokens * sum(layer.kept for layer in self.layers)
        graphs = [tokens * layer.graph for layer in self.layers]
        beside = tokens * max(layer.backward for layer in self.layers)
        page = _page_gradients(self.config, self.settings, self.context, self.element)
        if not self.settings.lora:
            beside += self.sizes.largest * self.element  # a gradient before it is added
        layer = max(graphs) + self._fixed(tokens) + page + beside
        if not self.settings.checkpointing:
            kept, layer = sum(graphs), layer - max(graphs)
        # the output embedding's gradient, and a chunk's share of it
        weight = 0 if self.settings.lora else 2 * self.sizes.head * self.element
        return kept + max(layer, self._head(tokens) + weight if head else 0)

    def _forward(self, tokens: int) -> int:
        return self._fixed(tokens) + tokens * max(layer.forward for layer in self.layers)

    def _fixed(self, tokens: int) -> int:
        return self.away + fixed_bytes(self.config, tokens, self.context + tokens)

    def _head(self, tokens: int) -> int:
        chunk = min(tokens, self.settings.head_chunk)
        hidden = 2 * tokens * int(self.config.hidden_size) * self.element
        return hidden + head_bytes(self.config, self.element, chunk)


def _page_gradients(config: Any, settings: Settings, context: int, element: int) -> int:
    """A kernel makes dk and dv of a whole page, also where they are dropped."""
    kinds = {state_of_layer(config, kind, element) for kind in layer_types_of(config)}
    widest = max((s.token for s in kinds if s.kind == "attention"), default=0)
    return widest * min(context, settings.page_tokens)


def _brought_over(config: Any, settings: Settings, context: int) -> int:
    """Rooms for two pages, or all latents of a layer, on their way from CPU memory."""
    element, found = _element(settings), 0
    for kind in set(layer_types_of(config)):
        layer = state_of_layer(config, kind, element)
        if layer.kind in settings.offload:
            tokens = context if layer.kind == "latent" else 2 * min(context, settings.page_tokens)
            found = max(found, layer.token * tokens)
    return found
