"""A verl training engine without the trainer: for comparisons, benchmarks and tests.

The same code builds our engine and verl's own, and the same rows go to both, so that only the
``strategy`` differs. A process group must exist; one process per rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine import EngineRegistry

from .config import LongStrawEngineConfig

__all__ = ["PPORow", "actor_config", "build_engine", "ppo_batch"]


@dataclass(frozen=True)
class PPORow:
    """One response with what PPO needs of it: token ids and per-token floats, [R] each."""

    prompt: Tensor
    response: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    ref_log_prob: Tensor
    loss_mask: Tensor | None = None
    uid: str = ""

    @property
    def mask(self) -> Tensor:
        """Which response tokens count, [R] int64; all by default."""
        return torch.ones_like(self.response) if self.loss_mask is None else self.loss_mask


def build_engine(
    strategy: str,
    model_path: str,
    *,
    options: Mapping[str, Any] | None = None,
    lora_rank: int = 0,
    lora_alpha: int = 16,
    lora_adapter_path: str | None = None,
    lr: float = 1e-3,
    dtype: str = "fp32",
    checkpointing: bool = True,
    forward_only: bool = False,
    engine: Mapping[str, Any] | None = None,
) -> Any:
    """An initialised engine of ``strategy`` (``longstraw``, ``fsdp2``) on the model at a path.

    verl's own engine on a CPU needs the environment ``VERL_ENGINE_DEVICE=cuda VERL_PLATFORM=cpu``.

    Args:
        options: of ``longstraw:``; ignored by other strategies.
        dtype: parameters and compute, as verl spells it (``fp32``, ``bf16``).
        engine: further engine settings.
    """
    mixed = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), dtype)
    settings: dict[str, Any] = dict(
        strategy=strategy,
        mixed_precision=mixed,
        use_torch_compile=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
        infer_micro_batch_size_per_gpu=1,
        forward_only=forward_only,
    ) | dict(engine or {})
    if strategy == "longstraw":
        engine_config: Any = LongStrawEngineConfig(**settings, longstraw=dict(options or {}))
    else:
        engine_config = FSDPEngineConfig(**settings)
    built = EngineRegistry.new(
        model_type="language_model",
        backend=strategy,
        model_config=_model_config(
            model_path,
            enable_gradient_checkpointing=checkpointing,
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            lora_adapter_path=lora_adapter_path,
        ),
        engine_config=engine_config,
        optimizer_config=None
        if forward_only
        else FSDPOptimizerConfig(
            lr=lr, lr_warmup_steps=0, total_training_steps=1000, weight_decay=0.0
        ),
        checkpoint_config=CheckpointConfig(),
    )
    built.initialize()
    return built


def _model_config(path: str, **settings: Any) -> HFModelConfig:
    return HFModelConfig(
        path=path,
        use_remove_padding=False,
        override_config={"attn_implementation": "sdpa"},
        target_modules="all-linear",
        load_tokenizer=(Path(path) / "tokenizer_config.json").exists(),
        **settings,
    )


def actor_config(**overrides: Any) -> FSDPActorConfig:
    """Actor settings of a DAPO run, for verl's ``ppo_loss``."""
    settings: dict[str, Any] = dict(
        strategy="longstraw",
        rollout_n=1,
        ppo_mini_batch_size=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        loss_agg_mode="token-mean",
        entropy_coeff=0.0,
        use_kl_loss=False,
    )
    return FSDPActorConfig(**(settings | overrides))


def ppo_batch(
    rows: Sequence[PPORow],
    *,
    global_rows: int | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    **settings: Any,
) -> TensorDict:
    """The TensorDict that verl's worker hands an engine for these rows.

    Args:
        global_rows: rows on all data-parallel ranks together.
        settings: further non-tensor settings.
    """
    per_token = {
        "input_ids": [torch.cat([r.prompt, r.response]) for r in rows],
        "position_ids": [torch.arange(r.prompt.numel() + r.response.numel()) for r in rows],
        "prompts": [r.prompt for r in rows],
        "responses": [r.response for r in rows],
        "loss_mask": [r.mask for r in rows],
        "response_mask": [r.mask.clone() for r in rows],
        "old_log_probs": [r.old_log_probs for r in rows],
        "advantages": [r.advantages for r in rows],
        "ref_log_prob": [r.ref_log_prob for r in rows],
    }
    tensors: dict[str, Any] = {
        name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
        for name, values in per_token.items()
    }
    plain = dict(
        temperature=temperature,
        calculate_entropy=entropy,
        use_remove_padding=False,
        use_dynamic_bsz=False,
        max_token_len_per_gpu=1 << 30,
        micro_batch_size_per_gpu=1,
        use_fused_kernels=False,
        global_batch_size=global_rows or len(rows),
        pad_mode=DatasetPadMode.NO_PADDING,
    )
    if isinstance(temperature, Tensor):
        tensors["temperature"] = plain.pop("temperature")
    batch: TensorDict = tu.get_tensordict(tensors, non_tensor_dict=plain | settings)
    return batch
