"""What each rank sends to the others in a capture and a replay, in bytes, without running them.

Sums of ``models/block_traffic.py`` over the blocks that a walk makes, of rows one at a time:

    capture            forward of each chunk of the prompt
    replay             forward, log-probs, backward of a response of one block; of a longer one
                       forward and log-probs of each block, then forward and backward of each
    prompt backward    ``gradient: exact``, once a group: forward and backward of each chunk

and with activation checkpointing another forward before each backward, without attention and
selection, which are kept. They are what ``Meter`` counts if every block is a multiple of the ranks;
what FSDP moves is not in them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from longstraw_backend.config import Gradient
from longstraw_backend.models.block_traffic import (
    Split,
    backward_bytes,
    forward_bytes,
    log_probs,
)

from .advance import spans

__all__ = [
    "captured_bytes",
    "captured_token_bytes",
    "replayed_bytes",
    "replayed_token_bytes",
    "reversed_prompt_bytes",
    "update_bytes",
]


def captured_bytes(config: Any, tokens: int, chunk: int, split: Split) -> Counter[str]:
    """By purpose, for capturing so many tokens in chunks of ``chunk``.

    Args:
        config: Hugging Face configuration of a supported text model.
        tokens: before the prompt boundary: one less than the prompt has.
    """
    total: Counter[str] = Counter()
    for block in _blocks(0, tokens, chunk):
        total.update(forward_bytes(config, block, split))
    return total


def replayed_bytes(
    config: Any, start: int, tokens: int, block: int, split: Split, *, checkpointing: bool
) -> Counter[str]:
    """By purpose, for replaying a response of so many tokens after ``start`` others.

    Args:
        block: ``response_block``.
        checkpointing: whether layers are recomputed in the backward.
    """
    total: Counter[str] = Counter()
    for part in _blocks(start, tokens, block):
        total.update({"log_probs": log_probs(part, split)})
        total.update(_replay(config, part, split, checkpointing))
        if tokens > block:
            total.update(forward_bytes(config, part, split))
    return total


def reversed_prompt_bytes(
    config: Any, tokens: int, chunk: int, split: Split, *, checkpointing: bool
) -> Counter[str]:
    """By purpose, for the walk back over the captured tokens that ``gradient: exact`` adds."""
    total: Counter[str] = Counter()
    for block in _blocks(0, tokens, chunk):
        total.update(_replay(config, block, split, checkpointing))
    return total


def update_bytes(
    config: Any,
    prompt: int,
    responses: list[int],
    split: Split,
    *,
    chunk: int,
    response_block: int,
    gradient: Gradient,
    checkpointing: bool,
) -> dict[str, Counter[str]]:
    """By phase of ``Meter`` and purpose, for one group in one update.

    Args:
        prompt: tokens of the prompt.
        responses: tokens of each response, no two of which begin alike.
        chunk: ``capture_tokens``.
    """
    before, replayed = prompt - 1, Counter[str]()
    for tokens in responses:
        more = dict(block=response_block, split=split, checkpointing=checkpointing)
        replayed.update(replayed_bytes(config, before, tokens, **more))  # type: ignore[arg-type]
    phases = {"capture": captured_bytes(config, before, chunk, split), "replay": replayed}
    if gradient == "exact":
        phases["prompt_backward"] = reversed_prompt_bytes(
            config, before, chunk, split, checkpointing=checkpointing
        )
    return phases


def captured_token_bytes(
    config: Any, cp: int, ep: int, *, chunk: int, element: int = 2
) -> dict[str, float]:
    """By purpose, for each token of a prompt, wherever it is behind a first chunk and, with an
    indexer, behind as many tokens as it selects.

    Args:
        cp: ranks that share the prompt.
        ep: ranks that share the experts.
        chunk: tokens of a block; only delta nets by position and counts of rows depend on it.
    """
    block, split = _deep(config, chunk), Split(cp, ep, element)
    return {p: n / chunk for p, n in forward_bytes(config, block, split).items()}


def replayed_token_bytes(
    config: Any,
    cp: int,
    ep: int,
    *,
    gradient: Gradient,
    checkpointing: bool,
    block: int,
    element: int = 2,
) -> dict[str, dict[str, float]]:
    """By what is replayed and purpose, for each ``response`` token, in a response of one block, and
    with ``gradient: exact`` for each ``prompt`` token, once a group."""
    part, split = _deep(config, block), Split(cp, ep, element)
    replay = _replay(config, part, split, checkpointing)
    response = replay + Counter({"log_probs": log_probs(part, split)})
    kinds = {"response": response} | ({"prompt": replay} if gradient == "exact" else {})
    return {kind: {p: n / block for p, n in sent.items()} for kind, sent in kinds.items()}


def _replay(config: Any, block: range, split: Split, checkpointing: bool) -> Counter[str]:
    """Forward and backward of the layers."""
    total: Counter[str] = Counter(forward_bytes(config, block, split))
    if checkpointing:
        total.update(forward_bytes(config, block, split, again=True))
    total.update(backward_bytes(config, block, split))
    return total


def _blocks(start: int, tokens: int, block: int) -> list[range]:
    return [range(start + part.start, start + part.stop) for part in spans(tokens, block)]


def _deep(config: Any, tokens: int) -> range:
    start = max(1, getattr(config, "index_topk", None) or 1)
    return range(start, start + tokens)
