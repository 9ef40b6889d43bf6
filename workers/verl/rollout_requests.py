"""What verl asks of a rollout, in the core's terms.

verl's agent loops send sampling options in vLLM's vocabulary, one request per response. The options
this rollout can honour become a `Sampling`; any other value is refused by name, because sampling
from another distribution than the one asked for would bias the training without a sign of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longstraw_backend.walk.decode import Sampling

__all__ = ["Limits", "read_sampling", "refuse_media", "wants_log_probs"]

_HONOURED = {
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "max_new_tokens",
    "ignore_eos",
    "do_sample",
    "logprobs",
}
# Options at these values ask for nothing.
_NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_p": 0.0,
    "n": 1,
    "prompt_logprobs": None,
    "stop": None,
    "stop_token_ids": None,
    "seed": None,
}


@dataclass(frozen=True)
class Limits:
    """Bounds of one run, from the rollout's configuration and the model.

    Attributes:
        response_length: most tokens of a response.
        max_model_len: most tokens of prompt and response together; None for no bound.
        eos_token_ids: any of them ends a response; empty with `ignore_eos`.
    """

    response_length: int
    max_model_len: int | None
    eos_token_ids: tuple[int, ...]


def refuse_media(media: Mapping[str, Any]) -> None:
    """Raise for images, videos or audio; empty containers count as absent."""
    present = sorted(name for name, value in media.items() if value)
    if present:
        raise ValueError(
            f"the longstraw rollout reads text prompts only, got {', '.join(present)}; "
            "use rollout.name=vllm for multimodal prompts"
        )


def wants_log_probs(params: Mapping[str, Any]) -> bool:
    """Whether the sampled tokens' log-probs were asked for; alternatives cannot be had."""
    wanted = params.get("logprobs", False)
    if wanted is not None and wanted is not False and wanted is not True and wanted != 0:
        raise ValueError(
            f"logprobs must be true or false, got {wanted!r}: the longstraw rollout returns the "
            "log-prob of the sampled token, not those of alternatives"
        )
    return wanted is not None and wanted is not False


def _refuse_unknown(params: Mapping[str, Any]) -> None:
    for name, value in params.items():
        if name in _HONOURED or (name in _NEUTRAL and value in (None, _NEUTRAL[name])):
            continue
        expected = f"only {_NEUTRAL[name]!r}" if name in _NEUTRAL else "no such option"
        raise ValueError(
            f"sampling option {name}={value!r} is not supported by the longstraw rollout "
            f"({expected}); remove it or use rollout.name=vllm"
        )


def _room(params: Mapping[str, Any], prompt_tokens: int, limits: Limits) -> int:
    """Tokens this response may have: the request's wish within the run's bounds."""
    wish = params.get("max_tokens", params.get("max_new_tokens"))
    room = limits.response_length if wish is None else min(int(wish), limits.response_length)
    if limits.max_model_len is not None:
        room = min(room, limits.max_model_len - prompt_tokens)
    if room < 1:
        raise ValueError(
            f"rollout.max_model_len={limits.max_model_len} must exceed the prompt, got a prompt of "
            f"{prompt_tokens} tokens and a wish for {wish} new ones; raise it to at least "
            f"{prompt_tokens + limits.response_length} or leave it null"
        )
    return room


def read_sampling(params: Mapping[str, Any], prompt_tokens: int, limits: Limits) -> Sampling:
    """One request's options as the core's `Sampling`.

    Args:
        params: verl's sampling parameters (vLLM names).
        prompt_tokens: length of the prompt.
        limits: of this run.
    Raises:
        ValueError: an option that cannot be honoured, or no room for a response.
    """
    _refuse_unknown(params)
    greedy = params.get("do_sample") is False
    return Sampling(
        max_new_tokens=_room(params, prompt_tokens, limits),
        temperature=0.0 if greedy else float(params.get("temperature", 1.0)),
        top_p=float(params.get("top_p", 1.0)),
        top_k=int(params.get("top_k", -1)),
        eos_token_ids=() if params.get("ignore_eos") else limits.eos_token_ids,
    )
