"""A tiny checkpoint as Qwen3.5 is published: text model, vision tower and MTP layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from longstraw_backend.tiny import tiny_model

__all__ = ["save_wrapped", "weights_of"]

_VISION: dict[str, Any] = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    out_hidden_size=64,
    num_position_embeddings=16,
    patch_size=4,
)


def save_wrapped(family: str, folder: Path, **options: Any) -> None:
    """Write one with random weights to an existing folder."""
    text: Any = tiny_model(family, initializer_range=0.1, **options)
    config = AutoConfig.for_model(
        family,
        text_config=text.config.to_dict(),
        vision_config=_VISION,
        tie_word_embeddings=text.config.tie_word_embeddings,
    )
    model = AutoModelForImageTextToText.from_config(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights |= {"mtp.fc.weight": torch.randn(4, 8), "mtp.norm.weight": torch.randn(4)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found
