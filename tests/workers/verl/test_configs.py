"""Every shipped YAML composes with verl's and builds into its class."""

import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPActorConfig, RolloutConfig

import longstraw_backend.configs
from longstraw_backend.config import LongStrawConfig
from longstraw_backend.workers.verl.config import LongStrawActorConfig, LongStrawEngineConfig

STOCK = ["actor_rollout_ref.actor.strategy=longstraw"]
ENGINE = ["model_engine=longstraw"]
MICRO = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]


def composed(*overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=["actor_rollout_ref.model.path=x", *overrides])
    OmegaConf.resolve(config)
    OmegaConf.set_struct(config, False)
    return config


def as_verl_builds_the_reference(node):
    """verl's worker renames the reference's log_prob_* settings before it builds the class."""
    for name in [n for n in node if n.startswith("log_prob_")]:
        node.pop(name)
    node.ppo_micro_batch_size_per_gpu = 1
    return omega_conf_to_dataclass(node)


@pytest.mark.parametrize(
    "overrides",
    [
        [*ENGINE, "actor_rollout_ref.rollout.name=vllm"],
        [*ENGINE, "+longstraw=grouped"],
        [*ENGINE, "+longstraw=cpu"],
        [*ENGINE, "+longstraw=qwen3_6_27b_2m"],
        [*ENGINE, "+longstraw=glm_5_2_2m"],
        [*STOCK, *MICRO, "actor_rollout_ref.rollout.name=vllm"],
        [*STOCK, *MICRO, "+longstraw=grouped"],
        [*STOCK, "+longstraw=cpu"],
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_composes_and_builds_its_classes(overrides):
    config = composed(*overrides)
    roles = config.actor_rollout_ref
    actor_class = LongStrawActorConfig if overrides[0] == ENGINE[0] else FSDPActorConfig
    actor = omega_conf_to_dataclass(roles.actor)
    assert type(actor) is actor_class
    assert actor.engine.strategy == "longstraw"
    reference = as_verl_builds_the_reference(roles.ref)
    assert type(reference) is actor_class
    assert reference.engine.strategy == "longstraw"
    assert reference.engine.forward_only
    assert isinstance(omega_conf_to_dataclass(roles.rollout), RolloutConfig)
    assert config.critic._target_ == "verl.workers.config.FSDPCriticConfig"


def test_command_line_composes_without_hydra_arguments(verl_env, tmp_path):
    """The real entry point, once: the plugin's search path is there before Hydra composes."""
    from sys import executable

    done = subprocess.run(
        [
            *[executable, "-W", "ignore", "-m", "verl.trainer.main_ppo"],
            *["model_engine=longstraw", "+longstraw=cpu"],
            "actor_rollout_ref.actor.longstraw.chunk_tokens=17",
            *["--cfg", "job", "--resolve"],
        ],
        env=verl_env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    assert config["actor_rollout_ref"]["ref"]["longstraw"]["chunk_tokens"] == 17
    assert config["ray_kwargs"]["ray_init"]["num_gpus"] == 1


def test_actor_yaml_mirrors_the_options_and_their_defaults():
    options = dict(composed(*ENGINE).actor_rollout_ref.actor.longstraw)
    assert options.pop("max_prompt_tokens") == 512  # follows data.max_prompt_length
    assert set(options) | {"max_prompt_tokens"} == {f.name for f in fields(LongStrawConfig)}
    defaults = LongStrawConfig()
    assert options == {name: getattr(defaults, name) for name in options}


def test_reference_follows_the_actors_options():
    config = composed(*ENGINE, "actor_rollout_ref.actor.longstraw.page_tokens=64")
    assert config.actor_rollout_ref.ref.longstraw.page_tokens == 64


def test_prompt_limit_follows_the_data():
    config = composed(*ENGINE, "data.max_prompt_length=2097152")
    assert config.actor_rollout_ref.actor.longstraw.max_prompt_tokens == 2097152


def test_sampler_gets_what_verl_would_not_pass():
    config = composed(
        *ENGINE,
        "+longstraw=grouped",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "data.train_batch_size=12",
    )
    given = config.trainer.v1.sampler.sampler_kwargs
    assert given.filter_groups.enable and given.filter_groups.metric == "acc"
    assert given.train_batch_size == 12


def test_overlay_values_can_be_overridden():
    config = composed(*ENGINE, "+longstraw=grouped", "actor_rollout_ref.rollout.name=vllm")
    assert config.actor_rollout_ref.rollout.name == "vllm"


def test_every_yaml_is_reached_by_a_test():
    """A new file must be added to the compositions above."""
    root = Path(longstraw_backend.configs.__path__[0])
    found = {str(path.relative_to(root)) for path in root.rglob("*.yaml")}
    assert found == {
        "actor/longstraw_actor.yaml",
        "critic/longstraw_critic.yaml",
        "longstraw/cpu.yaml",
        "longstraw/dapo_2m.yaml",
        "longstraw/glm_5_2_2m.yaml",
        "longstraw/glm_5_2_2m_yarn.yaml",
        "longstraw/grouped.yaml",
        "longstraw/qwen3_6_27b_2m.yaml",
        "longstraw/qwen3_6_27b_2m_yarn.yaml",
        "model_engine/longstraw.yaml",
        "ref/longstraw_ref.yaml",
    }


def actor(**values):
    given = {
        "_target_": "longstraw_backend.workers.verl.config.LongStrawActorConfig",
        "rollout_n": 2,
        "ppo_micro_batch_size_per_gpu": 1,
        "fsdp_config": {
            "_target_": "longstraw_backend.workers.verl.config.LongStrawEngineConfig",
        },
    }
    return omega_conf_to_dataclass(OmegaConf.create(given | values))


def test_options_reach_the_engine_typed():
    config = actor(longstraw={"chunk_tokens": 3})
    assert isinstance(config.engine, LongStrawEngineConfig)
    assert config.engine.longstraw == LongStrawConfig(chunk_tokens=3)
    assert config.engine.strategy == "longstraw"


def test_without_options_the_engine_section_keeps_its_own():
    section = {
        "_target_": "longstraw_backend.workers.verl.config.LongStrawEngineConfig",
        "longstraw": {"page_tokens": 5},
    }
    assert actor(fsdp_config=section).engine.longstraw == LongStrawConfig(page_tokens=5)


def test_another_strategy_can_be_compared_with_the_same_config():
    assert actor(strategy="fsdp2", longstraw={"chunk_tokens": 3}).engine.strategy == "fsdp2"


# Hydra wraps an error of a class it instantiates in one of its own; the text stays.
@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"longstraw": {"chunk_tokns": 3}}, "chunk_tokns"),
        ({"longstraw": {"chunk_tokens": 0}}, "chunk_tokens"),
        ({"longstraw": 3}, "must be a mapping"),
        (
            {
                "longstraw": {"chunk_tokens": 3},
                "fsdp_config": {"_target_": "verl.workers.config.FSDPEngineConfig"},
            },
            "would not reach the engine",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(values, text):
    with pytest.raises(Exception, match=text):
        actor(**values)


def test_unknown_engine_strategy_is_refused_as_by_verl():
    with pytest.raises(AssertionError, match="not supported"):
        LongStrawEngineConfig(strategy="nonsense")
