"""Typed configuration of the LongStraw actor, reference and engine inside verl.

verl's worker hands the engine nothing but the engine section (`fsdp_config`), while users set our
options beside the other actor options (`actor_rollout_ref.actor.longstraw.*`). The actor class
therefore checks the options and passes them on to the engine section when it is built. With
verl's stock classes (only `actor.strategy=longstraw` was set) there is no such section and the
engine uses the defaults of `LongStrawConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, HFModelConfig

from longstraw_backend.config import LongStrawConfig

__all__ = ["LongStrawActorConfig", "LongStrawEngineConfig", "LongStrawModelConfig"]

STRATEGY = "longstraw"


def _typed_options(options: Any) -> LongStrawConfig | None:
    """Options as they come from Hydra (a mapping), from Python (typed), or not at all."""
    if options is None or isinstance(options, LongStrawConfig):
        return options
    if isinstance(options, Mapping):
        return LongStrawConfig.from_mapping(options)
    raise ValueError(
        f"longstraw must be a mapping of options, got {type(options).__name__}; "
        "see configs/actor/longstraw_actor.yaml for the options"
    )


@dataclass
class LongStrawEngineConfig(FSDPEngineConfig):
    """FSDP engine configuration plus LongStraw's options.

    Args:
        longstraw: options of the capture/replay engine; None lets the actor's options fill it.
    """

    strategy: str = STRATEGY
    longstraw: Any = None

    def __post_init__(self) -> None:
        # The parent accepts only its own strategies; FSDP2 is what the engine builds on.
        strategy = self.strategy
        if strategy == STRATEGY:
            object.__setattr__(self, "strategy", "fsdp2")
        super().__post_init__()
        object.__setattr__(self, "strategy", strategy)
        object.__setattr__(self, "longstraw", _typed_options(self.longstraw))


@dataclass
class LongStrawActorConfig(FSDPActorConfig):
    """Actor (and reference) configuration plus LongStraw's options.

    Args:
        longstraw: options of the capture/replay engine, handed on to `fsdp_config.longstraw`.
    """

    strategy: str = STRATEGY
    longstraw: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        options = _typed_options(self.longstraw)
        object.__setattr__(self, "longstraw", options)
        if options is None:
            return
        if not isinstance(self.engine, LongStrawEngineConfig):
            raise ValueError(
                "actor.longstraw options need fsdp_config._target_ to be "
                f"{LongStrawEngineConfig.__module__}.{LongStrawEngineConfig.__qualname__}, got "
                f"{type(self.engine).__name__}; they would not reach the engine"
            )
        object.__setattr__(self.engine, "longstraw", options)


@dataclass
class LongStrawModelConfig(HFModelConfig):
    """verl's model configuration whose `override_config` may hold `rope_parameters`, for YaRN.

    verl sets nested overrides as attributes, which the rope parameters of transformers, a dict, do
    not have. The values given are laid over those of the text model; the others stay.
    """

    def __post_init__(self) -> None:
        given = self.override_config
        plain = {name: value for name, value in given.items() if name != "rope_parameters"}
        object.__setattr__(self, "override_config", plain)
        super().__post_init__()
        object.__setattr__(self, "override_config", given)
        text = self.hf_config.get_text_config()
        text.rope_parameters = {**text.rope_parameters, **given.get("rope_parameters", {})}
