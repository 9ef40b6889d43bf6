"""What is benched. Imports no torch, so that a command line can be read without it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

from longstraw_backend.choices import STATE_KINDS, Gradient, StateKind
from longstraw_backend.config import LongStrawConfig

__all__ = ["Device", "Dtype", "Settings", "Verb", "check_folder", "offload_kinds", "rungs_of"]

Verb = Literal["capture", "replay", "step", "ladder", "plan"]
Dtype = Literal["bfloat16", "float32"]
Device = Literal["cpu", "cuda"]

_COUNTS = "response", "group", "chunk", "page_tokens", "head_chunk", "cp"


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        verb: what is run.
        shape: name of a shape, which ``shapes.py`` lists, or the folder of a checkpoint.
        layers: the first so many layers only; None for all.
        vocab: size of the vocabulary instead of the published one.
        context: prompt tokens whose state is captured, ascending; several for a ladder only.
        response: tokens of each response, which are one block.
        group: responses, one after the other.
        chunk: prompt tokens of one capture call, and with ``exact`` of one block in reverse.
        head_chunk: response tokens whose logits exist at one time.
        page_tokens: tokens of a contiguous key/value buffer.
        gradient: ``exact`` keeps cotangents of the state.
        offload: kinds of state that rest in CPU memory.
        lora: rank of adapters; 0 trains all parameters.
        checkpointing: recompute each layer in the backward.
        random_state: random values in place of a captured state; ``capture`` then times one chunk
            after it.
        replay: also score and replay one response at each rung of a ladder.
        device: ``cpu`` or ``cuda``.
        dtype: of weights and activations; by default bfloat16 on CUDA, float32 on a CPU.
        profile: also give the shares of kernels.
        cp: ranks that share the prompt, parameters and optimizer, with a GPU each on CUDA.
        ep: ranks that share the experts; None as many of them as possible.
        budget_gb: GiB of device memory that a plan fills.
        folder: where a run keeps its progress and captured state; None keeps none.
        resume: go on from the state in the folder.
        save_every: minutes between saves of the state that is being captured; 0 saves none.
        seconds: stop a capture, saved, before so many have passed; None never does.
    """

    verb: Verb
    shape: str
    layers: int | None = None
    vocab: int | None = None
    context: tuple[int, ...] = (131072,)
    response: int = 1024
    group: int = 2
    chunk: int = 8192
    head_chunk: int = 1024
    page_tokens: int = LongStrawConfig.page_tokens
    gradient: Gradient = "response_only"
    offload: tuple[StateKind, ...] = ()
    lora: int = 0
    checkpointing: bool = True
    random_state: bool = False
    replay: bool = False
    device: Device = "cpu"
    dtype: Dtype | None = None
    profile: bool = True
    cp: int = 1
    ep: int | None = None
    budget_gb: float = 139.0
    folder: Path | None = None
    resume: bool = False
    save_every: float = 5.0
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _check_at_least(name, getattr(self, name), 1)
        for name in ("layers", "vocab"):
            if getattr(self, name) is not None:
                _check_at_least(name, getattr(self, name), 1)
        _check_at_least("lora", self.lora, 0)
        self._check_context()
        self._check_ranks()
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"--seconds: expected a positive number, got {self.seconds}")
        if not self.budget_gb > 0 or self.save_every < 0:
            raise ValueError(
                "--budget-gb, --save-every: expected a positive number and 0 or more, got "
                f"{self.budget_gb} and {self.save_every}"
            )
        if self.folder is None and (self.resume or self.seconds is not None):
            raise ValueError(
                "--resume, --seconds: state is kept in a folder; name it with --folder or --detach"
            )
        if self.dtype is None:
            default = "bfloat16" if self.device == "cuda" else "float32"
            object.__setattr__(self, "dtype", default)

    def _check_context(self) -> None:
        ascending = tuple(sorted(set(self.context)))
        if not self.context or ascending != self.context:
            raise ValueError(
                f"--context: expected lengths in ascending order, got {list(self.context)}"
            )
        _check_at_least("context", self.context[0], 1)
        if len(self.context) > 1 and self.verb not in ("ladder", "plan"):
            raise ValueError(
                f"--context: expected one length, got {len(self.context)}; take `ladder`"
            )
        if self.random_state and self.verb not in ("capture", "replay", "plan"):
            raise ValueError(
                f"--random-state: {self.verb} times a whole capture; take `capture` or `replay`"
            )
        uneven = [rung for rung in self.context[:-1] if rung % self.chunk]
        if uneven:
            raise ValueError(
                f"--context: expected multiples of --chunk {self.chunk} but for the last, "
                f"got {uneven[0]}"
            )

    def _check_ranks(self) -> None:
        if self.cp == 1:
            return
        for name in ("chunk", "response"):
            if getattr(self, name) % self.cp:
                raise ValueError(
                    f"--{name}: expected a multiple of --cp {self.cp}, got {getattr(self, name)}"
                )
        alone = {
            "--random-state": self.random_state,
            "--resume, --seconds": self.resume or self.seconds is not None,
            "plan": self.verb == "plan",
        }
        for name, asked in alone.items():
            if asked:
                raise ValueError(f"{name}: is of one rank, got --cp {self.cp}; take --cp 1")

    @property
    def config(self) -> LongStrawConfig:
        """The same as options of a walk."""
        return LongStrawConfig(
            gradient=self.gradient,
            response_block=self.response,
            chunk_tokens=self.chunk,
            page_tokens=self.page_tokens,
            head_chunk_tokens=self.head_chunk,
            host_state=self.offload,
            activation_checkpointing=self.checkpointing,
            state_budget_gb=0.0,  # keeps the newest
            host_state_budget_gb=0.0,
            shared_tokens=self.response + 1,
            progress=False,
        )

    @property
    def length(self) -> int:
        """Tokens that are captured: those of the longest rung."""
        return self.context[-1]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: str(v) if isinstance(v, Path) else _listed(v) for k, v in values.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Settings:
        """Inverse of :meth:`as_json`."""
        found: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        if found["folder"] is not None:
            found["folder"] = Path(found["folder"])
        return cls(**found)

    @property
    def walk(self) -> dict[str, Any]:
        """What a captured state depends on."""
        names = (
            "shape layers vocab chunk page_tokens gradient offload lora device dtype cp ep".split()
        )
        values = self.as_json()
        return {name: values[name] for name in names} | {"length": self.length}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def rungs_of(text: str) -> tuple[int, ...]:
    """Lengths of a comma-separated list, each with K or M for 1,024 or 1,048,576 if wanted.

    >>> rungs_of("64K,1M")
    (65536, 1048576)

    Raises:
        ValueError: one of them is no number.
    """
    return tuple(_length(part.strip()) for part in text.split(","))


def _length(text: str) -> int:
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    factor = {"": 1, "K": 1 << 10, "M": 1 << 20}.get(unit)
    if not digits.isdecimal() or factor is None:
        raise ValueError(f"--context: expected lengths such as 65536, 64K or 2M, got {text!r}")
    return int(digits) * factor


def offload_kinds(text: str) -> tuple[StateKind, ...]:
    """The kinds that a comma-separated list names; ``none`` and ``all`` are lists too.

    Raises:
        ValueError: one of them is not a kind of state.
    """
    if text in ("none", "all"):
        return get_args(StateKind) if text == "all" else ()
    kinds = tuple(part.strip() for part in text.split(","))
    unknown = [kind for kind in kinds if kind not in STATE_KINDS]
    if unknown:
        raise ValueError(
            f"--offload: expected none, all or a list of {', '.join(STATE_KINDS)}, "
            f"got {unknown[0]!r}"
        )
    return cast("tuple[StateKind, ...]", kinds)


def check_folder(name: str, path: Path | None) -> None:
    """Raise ValueError, naming the option, if the file could not be written."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(
            f"--{name}: expected a file in an existing folder, got {path}; create it first"
        )


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(
            f"--{name.replace('_', '-')}: expected an integer of at least {least}, got {value}"
        )
