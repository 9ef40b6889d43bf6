"""The model and the batch that both sides get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from longstraw_backend.groups import Group, group_rows
from longstraw_backend.models import check_supported
from longstraw_backend.oracle import Objective
from longstraw_backend.tiny import tiny_model
from longstraw_backend.wide import compute_wide

from .settings import Settings

__all__ = ["add_adapters", "base_model", "batch", "response_lengths", "turn_tokens"]

ENTROPY_COEFF = 0.01
_INIT = 0.1  # the usual 0.02 makes attention of a tiny model uniform, which hides errors


def base_model(settings: Settings) -> nn.Module:
    """A stock model on the device, in eval mode, without adapters.

    Raises:
        ValueError: the device is missing, or the model can't be loaded or is not supported.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: torch finds no CUDA device; use --device cpu")
    dtype = getattr(torch, settings.dtype)
    if settings.family is not None:
        model: Any = tiny_model(
            settings.family, dtype=dtype, seed=settings.seed, initializer_range=_INIT
        )
    else:
        model = _loaded(str(settings.model), dtype)
    check_supported(model.config)
    return model.to(settings.device).eval()  # type: ignore[no-any-return]


def _loaded(path: str, dtype: torch.dtype) -> Any:
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    except OSError as error:
        hint = "" if Path(path).is_dir() else "; there is no such folder"
        raise ValueError(f"--model: can't load {path!r}{hint}: {error}") from error
    if dtype == torch.float64:
        compute_wide(model)
    return model


def add_adapters(model: nn.Module, rank: int, seed: int, *, experts: bool = True) -> nn.Module:
    """LoRA on all linear layers but the output embedding; B is random, zero hides A's gradient.

    Args:
        experts: on fused experts too. Without them feed-forward layers get none at all.

    Raises:
        ValueError: peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("--lora: needs peft; pip install peft") from error
    options = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=_linear_layers(model) if experts else _plain_linear_layers(model),
        lora_dropout=0.0,
    )
    wrapped: nn.Module = get_peft_model(model, options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return wrapped.eval()


def _linear_layers(model: nn.Module) -> str | list[str]:
    """All of them and fused experts; routers too, but those with a correction bias: peft's wrapper
    of them hides it."""
    if not any("e_score_correction_bias" in name for name, _ in model.named_buffers()):
        return "all-linear"
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    return sorted({name.rsplit(".", 1)[-1] for name in linear} - {"lm_head"})


def _plain_linear_layers(model: nn.Module) -> list[str]:
    """Without dense and shared feed-forward layers: whatever is before their names, peft (0.21)
    takes them for those of experts, and adapts experts instead."""
    linear = {n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return sorted(linear - {"lm_head", "gate", "gate_proj", "up_proj", "down_proj"})


def response_lengths(longest: int, group: int) -> list[int]:
    """Ragged lengths from ``longest`` down to one token, evenly spread."""
    return [longest - (longest - 1) * i // max(1, group - 1) for i in range(group)]


def turn_tokens(settings: Settings) -> int:
    """Tokens of each turn but the last."""
    return settings.response // settings.turns if settings.turns > 1 else 0


def _responses(settings: Settings, tokens: Callable[[int], Tensor]) -> list[Tensor]:
    """Of one group: ``turns - 1`` shared turns and a last one of a row's own, of ragged length."""
    shared, each = settings.turns - 1, turn_tokens(settings)
    versions = [
        [tokens(each) for _ in range(-(-settings.group >> (shared - turn)))]
        for turn in range(shared)
    ]
    lengths = response_lengths(settings.response - shared * each, settings.group)
    return [
        torch.cat([*(v[row >> (shared - turn)] for turn, v in enumerate(versions)), tokens(length)])
        for row, length in enumerate(lengths)
    ]


def _is_answer(settings: Settings, response: Tensor) -> Tensor:
    """1 for tokens of answers, 0 for those of observations: the second half of a shared turn."""
    each = turn_tokens(settings)
    place = torch.arange(response.numel())
    shared = place < (settings.turns - 1) * each
    return torch.where(shared & (place % max(1, each) >= each // 2), 0.0, 1.0)


def batch(settings: Settings, vocab_size: int) -> tuple[list[Group], Objective]:
    """Groups whose rows lie mixed in the batch, and a loss with one advantage per row.

    Token ids, advantages and the jitter on them come from ``settings.seed``.
    """
    generator = torch.Generator().manual_seed(settings.seed)

    def tokens(count: int) -> Tensor:
        return torch.randint(0, vocab_size, (count,), generator=generator)

    prompts = [tokens(settings.prompt) for _ in range(settings.prompts)]
    by_prompt = [_responses(settings, tokens) for _ in prompts]
    responses = [r for rows in zip(*by_prompt, strict=True) for r in rows]
    total = sum(r.numel() for r in responses)
    advantages = torch.randn(len(responses), generator=generator) / total
    weights = [
        advantage * (1 + torch.rand(r.numel(), generator=generator)) * _is_answer(settings, r)
        for r, advantage in zip(responses, advantages, strict=True)
    ]
    groups = group_rows(prompts * settings.group, responses)
    return groups, Objective(weights, [settings.temperature] * len(responses), ENTROPY_COEFF)
