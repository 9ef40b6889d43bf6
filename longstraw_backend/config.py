"""Every knob of the core, with its range check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, get_args

from longstraw_backend.choices import (
    STAGINGS,
    STATE_KINDS,
    CotangentDtype,
    Gradient,
    Staging,
    StateKind,
)

if TYPE_CHECKING:
    from longstraw_backend.state import Placement

__all__ = ["Gradient", "LongStrawConfig"]

_POSITIVE_INTEGERS = (
    "response_block",
    "shared_tokens",
    "chunk_tokens",
    "page_tokens",
    "head_chunk_tokens",
    "context_parallel_size",
)

_OPTIONAL_INTEGERS = "prompt_block", "replay_tokens", "max_prompt_tokens", "expert_parallel_size"


@dataclass(frozen=True)
class LongStrawConfig:
    """How prompts are captured and responses replayed.

    Attributes:
        gradient: ``response_only`` trains responses against a constant prompt state (LongStraw,
            arXiv 2607.14952); it is not full-sequence training. ``exact`` is: after the responses
            of a group the prompt is walked once more, in reverse. That takes a forward and a
            backward of the prompt, and memory for cotangents of the state (twice the bytes of
            bfloat16 pages) and, with gated delta nets, a recurrent state for each block.
        response_block: response tokens in one graph; longer responses are walked forward without
            one, then in reverse, block by block, for one forward more.
        prompt_block: the same for prompts in ``exact``; None takes ``chunk_tokens``. Prompts are
            then captured in these blocks.
        shared_tokens: responses of a group that have at least so many tokens in common from their
            beginning, as turns of an agent do, share them: they are run once.
        replay_tokens: responses that follow each other in a group, are no longer than a block and
            have one temperature share a pass while their number times the longest is at most so
            many tokens; that many are then in one graph. None runs each alone.
        cotangent_dtype: in which cotangents of pages add up; never narrower than the pages.
        chunk_tokens: prompt tokens per capture chunk. It need not divide the prompt. For models
            with gated-delta-net layers prefer a multiple of 64, the chunk of the delta rule, which
            otherwise ends each capture chunk with a shorter one.
        page_tokens: tokens per contiguous key/value buffer; longer segments use several.
        head_chunk_tokens: tokens whose logits exist at one time.
        host_state: kinds of prompt state that rest in CPU memory, pinned where there is a GPU, and
            are brought to the device when a kernel needs them: ``attention`` (keys and values),
            ``latent`` (MLA), ``recurrent`` (gated delta nets). Others rest on the device. Nearly
            free for blocks of a few thousand tokens; slow for decoding.
        staging: how attention brings its pages over: ``segments`` copies one page while it runs
            over the one before; ``layer`` copies all pages of the layer first. Latents that tokens
            select from always come a layer at a time, index keys in blocks.
        state_budget_gb: prompt states kept for reuse on the device, in GiB per rank; the one in use
            always fits.
        host_state_budget_gb: the same in CPU memory.
        report_gradient_gap_every: every so many updates, run the batch for the other gradient too
            and report how far ``response_only`` is from ``exact``; 0 never does.
        activation_checkpointing: recompute each decoder layer in the backward of a replay, but for
            its attention over all tokens, whose output is kept. None leaves the choice to the host
            (verl: ``model.enable_gradient_checkpointing``).
        max_prompt_tokens: refuse prompts of this length or more. verl truncates prompts to
            ``data.max_prompt_length`` without an error; None if the limit is not known.
        context_parallel_size: ranks that share the state and the tokens of one prompt; divides the
            number of ranks. Prompt and response blocks must be multiples of it.
        expert_parallel_size: ranks that share the experts of a layer; divides the number of ranks
            and that of experts. None takes as many of those that share a prompt as possible.
        check_replicas: after each update compare copies of parameters, buffers and optimizer state
            over ranks, to the bit; for debugging: it brings all of them to the CPU.
        progress: show a bar on rank 0 for captures and replays that last.
    """

    gradient: Gradient = "response_only"
    response_block: int = 8192
    prompt_block: int | None = None
    shared_tokens: int = 256
    replay_tokens: int | None = None
    cotangent_dtype: CotangentDtype = "float32"
    chunk_tokens: int = 4096
    page_tokens: int = 131072
    head_chunk_tokens: int = 1024
    host_state: tuple[StateKind, ...] = ()
    staging: Staging = "segments"
    state_budget_gb: float = 8.0
    host_state_budget_gb: float = 64.0
    report_gradient_gap_every: int = 0
    activation_checkpointing: bool | None = None
    max_prompt_tokens: int | None = None
    context_parallel_size: int = 1
    expert_parallel_size: int | None = None
    check_replicas: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        if self.gradient not in get_args(Gradient):
            raise ValueError(
                f"gradient: expected one of {get_args(Gradient)}, got {self.gradient!r}"
            )
        if self.cotangent_dtype not in get_args(CotangentDtype):
            raise ValueError(
                f"cotangent_dtype: expected one of {get_args(CotangentDtype)}, "
                f"got {self.cotangent_dtype!r}"
            )
        for name in _POSITIVE_INTEGERS:
            _check_positive_integer(name, getattr(self, name))
        if self.report_gradient_gap_every:
            _check_positive_integer("report_gradient_gap_every", self.report_gradient_gap_every)
        for name in _OPTIONAL_INTEGERS:
            if getattr(self, name) is not None:
                _check_positive_integer(name, getattr(self, name))
        for name in ("chunk_tokens", "prompt_block", "response_block"):
            _check_shared_evenly(name, getattr(self, name), self.context_parallel_size)
        for name in ("state_budget_gb", "host_state_budget_gb"):
            budget = getattr(self, name)
            if not isinstance(budget, int | float) or not budget >= 0:
                raise ValueError(f"{name}: expected 0 or more GiB, got {budget!r}")
        if self.staging not in STAGINGS:
            raise ValueError(f"staging: expected one of {STAGINGS}, got {self.staging!r}")
        _check_kinds(self.host_state)
        object.__setattr__(self, "host_state", tuple(self.host_state))  # YAML has lists

    @property
    def capture_tokens(self) -> int:
        """Prompt tokens of one capture call: what is walked in reverse must have been captured in
        the same blocks."""
        if self.gradient == "exact" and self.prompt_block is not None:
            return self.prompt_block
        return self.chunk_tokens

    @property
    def placement(self) -> Placement:
        """Where prompt state rests."""
        from longstraw_backend.state import Placement  # torch, which options do without

        return Placement(frozenset(self.host_state), self.staging)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any] | None) -> LongStrawConfig:
        """Build from a YAML node; raises ValueError for a key that is no option."""
        known = {f.name for f in fields(cls)}
        options = dict(options or {})
        unknown = sorted(set(options) - known)
        if unknown:
            raise ValueError(
                f"longstraw: unknown option {unknown[0]!r}; known are {', '.join(sorted(known))}"
            )
        return cls(**options)


def _check_kinds(kinds: Any) -> None:
    listed = isinstance(kinds, Sequence) and not isinstance(kinds, str)
    if not listed or any(kind not in STATE_KINDS for kind in kinds):
        raise ValueError(f"host_state: expected a list of any of {STATE_KINDS}, got {kinds!r}")


def _check_shared_evenly(name: str, tokens: int | None, ranks: int) -> None:
    """A remainder in every block would leave some ranks with more state than others."""
    if tokens is not None and tokens % ranks:
        raise ValueError(
            f"{name}: expected a multiple of context_parallel_size {ranks}, got {tokens}; "
            f"{-(-tokens // ranks) * ranks} is one"
        )


def _check_positive_integer(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: expected a positive integer, got {value!r}")
