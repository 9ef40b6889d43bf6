"""Which layers run an indexer and which reuse the selection of the one before (IndexShare).

GLM-5.2 (arXiv 2603.12201) computes the selection in 21 of its 78 layers. Only those keep indexer
keys; in between, the selection travels from layer to layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

__all__ = ["LayerKind", "indexer_schedule", "layer_kinds"]

LayerKind = Literal["full", "shared", "dense"]
"""Selects its tokens, reuses a selection, or attends to all tokens (no indexer in the model)."""

_DEFAULT_OFFSET = 2
_LETTERS: dict[str, LayerKind] = {"F": "full", "S": "shared"}


def indexer_schedule(num_layers: int, freq: int, offset: int = _DEFAULT_OFFSET) -> list[LayerKind]:
    """``full`` where max(layer - offset + 1, 0) is a multiple of ``freq``; layers count from 0."""
    every = max(freq, 1)
    return [
        "full" if max(layer - offset + 1, 0) % every == 0 else "shared"
        for layer in range(num_layers)
    ]


def layer_kinds(config: Any) -> list[LayerKind]:
    """Each layer's kind, from a Hugging Face configuration.

    ``indexer_types`` decides where it is set; else ``index_topk_pattern`` ("FSSF..."); else
    ``index_topk_freq`` and ``index_skip_topk_offset`` (a missing one is 1 or 2). Without
    ``index_topk`` all layers are dense.

    Raises:
        ValueError: the types don't fit the layers, or transformers filled them in wrongly.
    """
    count: int = config.num_hidden_layers
    if getattr(config, "index_topk", None) is None:
        return ["dense"] * count
    types = getattr(config, "indexer_types", None)
    if types is None:
        types = _from_pattern_or_schedule(config, count)
    else:
        _check_offset(config, list(types))
    return _checked(types, count)


def _from_pattern_or_schedule(config: Any, count: int) -> Sequence[str]:
    pattern = getattr(config, "index_topk_pattern", None)
    if pattern is not None:
        return [_LETTERS.get(c, c) for c in pattern]
    freq = getattr(config, "index_topk_freq", 1)
    return indexer_schedule(count, freq, getattr(config, "index_skip_topk_offset", _DEFAULT_OFFSET))


def _check_offset(config: Any, types: list[str]) -> None:
    """transformers before 5.11 fills in ``indexer_types`` with offset 2, whatever the offset is,
    and drops the frequency; refuse what looks like that."""
    offset = getattr(config, "index_skip_topk_offset", _DEFAULT_OFFSET)
    for freq in range(2, len(types) + 1):
        made = indexer_schedule(len(types), freq)
        if types == made and made != indexer_schedule(len(types), freq, offset):
            raise ValueError(
                f"indexer_types: expected a schedule with index_skip_topk_offset={offset}, got one "
                "with 2, which old transformers fills in; write indexer_types into config.json"
            )


def _checked(types: Sequence[str], count: int) -> list[LayerKind]:
    kinds: list[LayerKind] = []
    for i, kind in enumerate(types):
        if kind not in _LETTERS.values():
            raise ValueError(f"indexer_types[{i}]: expected 'full' or 'shared', got {kind!r}")
        kinds.append("full" if kind == "full" else "shared")
    if len(kinds) != count:
        raise ValueError(f"indexer_types: expected {count}, one for each layer, got {len(kinds)}")
    if kinds[0] != "full":
        raise ValueError("indexer_types[0]: 'shared', but no layer before it made a selection")
    return kinds
