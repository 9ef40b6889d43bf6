"""Text models by published sizes, without weights.

Qwen3.5 0.8B to 9B, Qwen3.6-27B and 35B-A3B, Qwen3-8B: sizes of the published ``config.json``. Every
fourth layer of Qwen3.5 and 3.6 is full attention, the others are gated delta nets. GLM-5.2: hidden
6,144, 78 layers, the first three without experts, 21 with an indexer (index_topk_freq 4, offset 3).
What a benchmark can't notice (the base of RoPE, say) is published too, or transformers' default.
Names ``tiny-FAMILY`` are the models of ``longstraw_backend/tiny.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["SHAPES", "config_of", "random_model", "shape_names"]

_QWEN3_5: dict[str, Any] = dict(
    vocab_size=248320,
    head_dim=256,
    linear_num_key_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    max_position_embeddings=262144,
    rope_parameters=dict(
        rope_type="default",
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        mrope_section=[11, 11, 10],
        mrope_interleaved=True,
    ),
)


def _qwen3_5(
    layers: int, hidden: int, ffn: int, heads: tuple[int, int], delta_heads: int, tied: bool
) -> dict[str, Any]:
    """A dense one: ``heads`` are those of queries and of keys and values, ``delta_heads`` the value
    heads of a gated delta net."""
    return _QWEN3_5 | dict(
        model_type="qwen3_5_text",
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        linear_num_value_heads=delta_heads,
        tie_word_embeddings=tied,
    )


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": _qwen3_5(24, 1024, 3584, (8, 2), 16, tied=True),
    "qwen3.5-4b": _qwen3_5(32, 2560, 9216, (16, 4), 32, tied=True),
    "qwen3.5-9b": _qwen3_5(32, 4096, 12288, (16, 4), 32, tied=False),
    "qwen3.6-27b": _qwen3_5(64, 5120, 17408, (24, 4), 48, tied=False),
    "qwen3.6-35b-a3b": _QWEN3_5
    | dict(
        model_type="qwen3_5_moe_text",
        num_hidden_layers=40,
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=2,
        linear_num_value_heads=32,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        tie_word_embeddings=False,
    ),
    "qwen3-8b": dict(
        model_type="qwen3",
        vocab_size=151936,
        num_hidden_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters=dict(rope_type="default", rope_theta=1e6),
        tie_word_embeddings=False,
    ),
    "glm-5.2": dict(
        model_type="glm_moe_dsa",
        vocab_size=154880,
        hidden_size=6144,
        intermediate_size=12288,
        num_hidden_layers=78,
        num_attention_heads=64,
        q_lora_rank=2048,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=2048,
        index_skip_topk_offset=3,
        mlp_layer_types=["dense"] * 3 + ["sparse"] * 75,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        max_position_embeddings=1 << 20,
        rope_parameters=dict(rope_type="default", rope_theta=8e6),
    ),
}
"""By name, the ``model_type`` and options of a Hugging Face configuration."""

_TINY = "tiny-"
_PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")


def shape_names(families: Sequence[str] = ()) -> list[str]:
    """All names; those of tiny models only for the families given."""
    return [*SHAPES, *(f"{_TINY}{family}" for family in families)]


def config_of(name: str, layers: int | None = None, vocab: int | None = None) -> Any:
    """The configuration of a text model.

    Args:
        name: of a shape, or the folder of a checkpoint, of which ``config.json`` alone is read.
        layers: keep the first so many; whether they are whole periods of a pattern is the caller's
            matter.
        vocab: another size of the vocabulary.

    Raises:
        ValueError: there is no such shape, its family is not supported, or it has fewer layers.
    """
    from transformers import AutoConfig

    folder = Path(name)
    options = _published(folder) if (folder / "config.json").is_file() else _options(name)
    have = options["num_hidden_layers"]
    count = have if layers is None else layers
    if not 1 <= count <= have:
        raise ValueError(f"--layers: expected 1 to {have}, those of {name}, got {layers}")
    options["num_hidden_layers"] = count
    for field in _PER_LAYER:
        if field in options:
            options[field] = list(options[field])[:count]
    if vocab is not None:
        options["vocab_size"] = vocab
    return AutoConfig.for_model(options.pop("model_type"), **options)


def _published(folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    from longstraw_backend.models import check_supported

    config = AutoConfig.from_pretrained(folder).get_text_config()
    try:
        check_supported(config)
    except ValueError as error:
        raise ValueError(f"--shape: {folder}: {error}") from error
    options: dict[str, Any] = config.to_dict()
    return options


def _options(name: str) -> dict[str, Any]:
    from longstraw_backend.models.families import SUPPORTED, text_model_type
    from longstraw_backend.models.index_share import indexer_schedule
    from longstraw_backend.tiny import options_of

    if name.startswith(_TINY) and name.removeprefix(_TINY) in SUPPORTED:
        family = name.removeprefix(_TINY)
        return options_of(family) | {"model_type": text_model_type(family)}
    if name not in SHAPES:
        known = ", ".join(shape_names())
        raise ValueError(
            f"--shape: expected one of {known}, tiny-FAMILY or the folder of a checkpoint, "
            f"got {name!r}"
        )
    options = dict(SHAPES[name])
    if options["model_type"] == "glm_moe_dsa":
        options["indexer_types"] = indexer_schedule(78, freq=4, offset=3)
    if options["model_type"].startswith("qwen3_5"):
        period = ["linear_attention"] * 3 + ["full_attention"]
        options["layer_types"] = period * (options["num_hidden_layers"] // 4)
    return options


def random_model(config: Any, device: str, dtype: str, seed: int = 0) -> Any:
    """A stock causal LM with random weights (the stock initialisation), made where and as it is to
    be, in eval mode.

    Raises:
        ValueError: the device is missing.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: torch finds no CUDA device; use --device cpu")
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    return model.to(device).eval()
