"""The overlays and launch scripts of Qwen3.6-27B and GLM-5.2: what they compose to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import RolloutConfig

from longstraw_backend.models.checkpoint import text_config
from longstraw_backend.workers.verl.config import LongStrawActorConfig, LongStrawModelConfig
from tests.models.wrapped import save_wrapped
from tests.workers.verl.test_configs import ENGINE, composed

ROOT = Path(__file__).resolve().parents[3]
LONG = {"qwen3_6_27b": ("qwen3_6_27b_2m", 8, None), "glm_5_2": ("glm_5_2_2m", 32, 32)}


@pytest.mark.parametrize("example", LONG)
def test_script_composes_and_builds_its_classes(
    example: str, verl_env: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [str(ROOT / "examples" / example / "run.sh"), "--cfg", "job", "--resolve"],
        env=verl_env
        | {"PYTHON": sys.executable, "MODEL": "m", "TRAIN": "t", "VAL": "v", "REWARD": "r"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    config = OmegaConf.create(yaml.safe_load(done.stdout))
    _, ranks, expert_ranks = LONG[example]
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert type(actor) is LongStrawActorConfig
    assert actor.longstraw.context_parallel_size == ranks
    assert actor.longstraw.expert_parallel_size == expert_ranks
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == ranks
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert isinstance(rollout, RolloutConfig)
    assert rollout.tensor_model_parallel_size == ranks


@pytest.mark.parametrize("overlay", [overlay for overlay, *_ in LONG.values()])
def test_overlay_is_dapo_with_lora_and_without_yarn(overlay: str) -> None:
    config = composed(*ENGINE, f"+longstraw={overlay}")
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.28)
    assert actor.loss_agg_mode == "token-mean" and not actor.use_kl_loss
    assert config.algorithm.filter_groups.enable and config.actor_rollout_ref.rollout.n == 8
    assert config.data.max_prompt_length + config.data.max_response_length == 2**21
    assert model.lora_rank > 0 and model.enable_gradient_checkpointing
    assert "rope_parameters" not in model.override_config


@pytest.mark.parametrize("overlay", [overlay for overlay, *_ in LONG.values()])
def test_engine_can_be_swapped_for_a_comparison(overlay: str) -> None:
    config = composed(*ENGINE, f"+longstraw={overlay}", "actor_rollout_ref.actor.strategy=fsdp2")
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine.strategy == "fsdp2"


ROPE = {
    "qwen3_5": dict(
        rope_type="default",
        rope_theta=1e7,
        partial_rotary_factor=0.25,  # of head_dim, as Qwen3.6 has it
        mrope_section=[2, 1, 1],
        mrope_interleaved=True,
    ),
    "glm_moe_dsa": dict(rope_type="default", rope_theta=8e6),
}


def save_tiny(family: str, folder: Path) -> None:
    """Weights where a test loads them, else only the configuration."""
    folder.mkdir()
    if family == "qwen3_5":
        save_wrapped(family, folder, head_dim=32, rope_parameters=ROPE[family])
    else:
        sizes = dict(hidden_size=64, num_hidden_layers=4, vocab_size=311, qk_rope_head_dim=16)
        config = AutoConfig.for_model(family, rope_parameters=ROPE[family], **sizes)
        config.architectures = ["GlmMoeDsaForCausalLM"]
        config.save_pretrained(folder)


def model_config(overlay: str, path: Path) -> Any:
    config = composed(
        *ENGINE,
        f"+longstraw={overlay}",
        f"actor_rollout_ref.model.path={path}",
        "+actor_rollout_ref.model.load_tokenizer=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    )
    return omega_conf_to_dataclass(config.actor_rollout_ref.model)


@pytest.mark.parametrize(
    ("family", "overlay", "factor", "native"),
    [
        ("qwen3_5", "qwen3_6_27b_2m_yarn", 8.0, 262144),
        ("glm_moe_dsa", "glm_5_2_2m_yarn", 2.0, 1048576),
    ],
)
def test_yarn_reaches_the_models_configuration(
    family: str, overlay: str, factor: float, native: int, tmp_path: Path
) -> None:
    save_tiny(family, tmp_path / "model")
    config = model_config(overlay, tmp_path / "model")
    assert type(config) is LongStrawModelConfig
    found = config.hf_config.get_text_config().rope_parameters
    yarn = dict(rope_type="yarn", factor=factor, original_max_position_embeddings=native)
    assert found == ROPE[family] | yarn
    assert config.override_config["attn_implementation"] == "sdpa"


def test_yarn_of_a_hybrid_turns_the_slow_pairs_slower(tmp_path: Path) -> None:
    """The configuration that was overridden is the one the text model is built from."""
    save_tiny("qwen3_5", tmp_path / "model")
    frequencies = []
    for overlay in ("qwen3_6_27b_2m", "qwen3_6_27b_2m_yarn"):
        config = text_config(model_config(overlay, tmp_path / "model").hf_config)
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", config=config)
        frequencies.append(model.model.rotary_emb.inv_freq)
        assert model.model.rotary_emb.mrope_section == [2, 1, 1]
    plain, yarn = frequencies
    assert plain.shape == yarn.shape == (4,)
    assert yarn[0] == plain[0]
    assert yarn[-1] == pytest.approx(plain[-1] / 8)
