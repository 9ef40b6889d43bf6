"""Tiny checkpoints as they are published, with more than a text model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from longstraw_backend.tiny import options_of, tiny_model

from .mla_layers import randomise

__all__ = ["rewrite", "save_latent", "save_wrapped", "stack_experts", "weights_of"]

_VISION: dict[str, Any] = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    out_hidden_size=64,
    num_position_embeddings=16,
    patch_size=4,
)
_LATENT_MOE: dict[str, Any] = dict(
    hidden_size=48,
    intermediate_size=32,
    moe_intermediate_size=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    max_position_embeddings=1 << 16,
)


def save_wrapped(family: str, folder: Path, **options: Any) -> None:
    """A text model with a vision tower and an MTP layer, as Qwen3.5's, in an existing folder."""
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
    mtp = {"mtp.fc.weight": torch.randn(4, 8), "mtp.norm.weight": torch.randn(4)}
    rewrite(folder, weights_of(folder) | mtp)


def save_latent(family: str, folder: Path, layers: int = 3) -> None:
    """A glm_moe_dsa or deepseek model and the MTP layer after its last, in an existing folder.

    The router's biases need float32, and decide which experts are chosen.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(options_of(family) | _LATENT_MOE | _depth(layers)))
    model = AutoModelForCausalLM.from_config(config)
    randomise(model)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    mtp = f"model.layers.{layers}."
    weights = weights_of(folder) | {mtp + "eh_proj.weight": torch.randn(48, 96)}
    rewrite(folder, weights | {mtp + "mlp.experts.0.up_proj.weight": torch.randn(16, 48)})


def _depth(layers: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
        "indexer_types": ["full"] * layers,
    }


def rewrite(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Other weights in a checkpoint of one file."""
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def stack_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights with one tensor for all experts of a layer, in place of one an expert."""
    done = {n: w for n, w in weights.items() if ".experts." not in n or n.startswith("mtp.")}
    for experts in sorted({n.split(".experts.")[0] + ".experts" for n in weights.keys() - done}):
        count = sum(n.startswith(experts) and n.endswith(".down_proj.weight") for n in weights)
        parts = {
            kind: [weights[f"{experts}.{e}.{kind}_proj.weight"] for e in range(count)]
            for kind in ("gate", "up", "down")
        }
        gate_up = torch.cat([torch.stack(parts["gate"]), torch.stack(parts["up"])], dim=1)
        done |= {f"{experts}.gate_up_proj": gate_up}
        done |= {f"{experts}.down_proj": torch.stack(parts["down"])}
    return done


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found
