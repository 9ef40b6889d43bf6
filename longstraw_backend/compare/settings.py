"""What is compared, and the bars it must meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from longstraw_backend.config import Gradient, LongStrawConfig

__all__ = ["BARS", "DELTA_NET_GRADIENT_BAR", "Against", "Settings"]

Against = Literal["detached", "full", "verl-fsdp2"]
Dtype = Literal["float32", "float64", "bfloat16"]
Device = Literal["cpu", "cuda"]

BARS = {"float64": 1e-9, "float32": 1e-5}
"""Largest error of a log-prob (nats) and of the gradient (relative L2).

bfloat16 has no such bar: both sides are measured against float32, and ours may be off by twice the
error of the ordinary trainer.
"""

DELTA_NET_GRADIENT_BAR = 1e-7
"""Of the gradient in float64, for gated-delta-net families: their stock modules sum the gradients
of the decay in float32, in an order that depends on how many tokens there are."""

_COUNTS = {
    "prompt": 1,
    "response": 1,
    "group": 1,
    "prompts": 1,
    "chunk": 1,
    "response_block": 1,
    "replay_tokens": 0,
    "turns": 1,
    "seed": 0,
    "lora": 0,
    "cp": 1,
    "dp": 1,
}
_CHOICES = {"against": Against, "dtype": Dtype, "device": Device, "gradient": Gradient}
_SAME: dict[Gradient, Against] = {"response_only": "detached", "exact": "full"}


@dataclass(frozen=True)
class Settings:
    """One comparison. Exactly one of ``family`` and ``model`` is given.

    Attributes:
        family: a tiny random model of this Hugging Face ``model_type``.
        model: path or name of a causal LM.
        prompt: tokens of each prompt.
        response: tokens of the longest response of a group; the shortest has one.
        group: responses per prompt.
        prompts: groups.
        chunk: prompt tokens per capture chunk.
        gradient: which one we compute.
        response_block: response tokens in one graph.
        replay_tokens: of short responses that share a pass, at most; 0 runs each alone.
        turns: of each response. With several, rows share all but the last: half as many versions of
            a turn as of the next one; the second half of a shared turn is an observation, without
            weight in the loss.
        lora: rank of adapters with random, non-zero B; 0 trains all parameters.
        against: which ordinary training; by default the one whose gradient ours must equal.
        cp: ranks that share a prompt. With more than one rank in all, cp x dp, the other side is
            our own run on one rank.
        ep: ranks that share the experts of a layer; None takes as many of those that share a prompt
            as divide the number of experts.
        dp: parts that the groups are dealt to.
    """

    family: str | None = "qwen3"
    model: str | None = None
    prompt: int = 256
    response: int = 32
    group: int = 4
    prompts: int = 2
    chunk: int = 4096
    dtype: Dtype = "float32"
    device: Device = "cpu"
    seed: int = 0
    temperature: float = 1.0
    lora: int = 0
    gradient: Gradient = "response_only"
    response_block: int = LongStrawConfig.response_block
    replay_tokens: int = 0
    turns: int = 1
    against: Against | None = None
    cp: int = 1
    ep: int | None = None
    dp: int = 1

    def __post_init__(self) -> None:
        if (self.family is None) == (self.model is None):
            raise ValueError(
                f"--family, --model: expected one of them, got {self.family!r} and {self.model!r}"
            )
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if value < least:
                option = name.replace("_", "-")
                raise ValueError(
                    f"--{option}: expected an integer of at least {least}, got {value}"
                )
        self._check_ranks()
        if self.against is None and self.gradient in _SAME:
            object.__setattr__(self, "against", _SAME[self.gradient])
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in get_args(choices):
                raise ValueError(
                    f"--{name}: expected one of {', '.join(get_args(choices))}, got {value!r}"
                )
        if not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"--temperature: expected a positive number, got {self.temperature}; "
                "greedy decoding has no gradient"
            )
        if self.turns > self.response:
            raise ValueError(
                f"--turns: expected at most one per token of --response {self.response}, "
                f"got {self.turns}"
            )
        if self.against == "verl-fsdp2" and self.dtype != "float32":
            raise ValueError(
                f"--dtype: --against verl-fsdp2 loads the model in float32, got {self.dtype}; use "
                "--dtype float32"
            )

    def _check_ranks(self) -> None:
        if self.ep is not None and (self.ep < 1 or self.ranks % self.ep):
            raise ValueError(
                f"--ep: expected a divisor of the number of ranks, --cp times --dp = {self.ranks}, "
                f"got {self.ep}"
            )
        for name in ("chunk", "response_block"):
            tokens = getattr(self, name)
            if tokens % self.cp:
                raise ValueError(
                    f"--{name.replace('_', '-')}: expected a multiple of --cp {self.cp}, got "
                    f"{tokens}; {-(-tokens // self.cp) * self.cp} is one"
                )
        if self.ranks > 1 and self.against not in (None, _SAME.get(self.gradient)):
            raise ValueError(
                f"--against: {self.ranks} ranks are compared with our own run on one, got "
                f"{self.against}; leave it out"
            )

    @property
    def ranks(self) -> int:
        """How many there are in all."""
        return self.cp * self.dp

    @property
    def gradient_is_ours(self) -> bool:
        """Whether the other side's gradient is the one we claim to compute."""
        return (self.against == "detached") == (self.gradient == "response_only")
