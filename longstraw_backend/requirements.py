"""Which packages are installed, in which versions, and which versions they should have.

The ranges are read from the metadata of this package and of those it works with, where pip reads
them too: they are written down once, in ``pyproject.toml``.
"""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

__all__ = [
    "PACKAGES",
    "Package",
    "extra_names",
    "installed_version",
    "python_range",
    "wanted_range",
]

OWN = "longstraw-backend"
_HOLDERS = (OWN, "verl", "vllm")  # whose ranges count


@dataclass(frozen=True)
class Package:
    """A package to look for.

    Attributes:
        name: of the distribution.
        module: what is imported.
        purpose: what it is needed for.
        needed: ``always``, for ``training``, or not at all (``optional``).
        extra: ours that brings it; empty for a dependency of ours, None for neither.
    """

    name: str
    module: str
    purpose: str
    needed: str
    extra: str | None = ""

    @property
    def remedy(self) -> str:
        """How to get it in a version that fits."""
        if self.extra is None:
            return f'pip install "{self.name}{wanted_range(self.name)}"'
        extra = f"[{self.extra}]" if self.extra else ""
        isolation = "--no-build-isolation " if self.extra == "gpu" else ""
        return f'pip install {isolation}"{OWN}{extra}"'


PACKAGES = (
    Package("torch", "torch", "tensors, autograd and the attention kernels", "always"),
    Package("transformers", "transformers", "the models", "always"),
    Package("verl", "verl", "the trainer", "training", "verl"),
    Package("ray", "ray", "verl's processes", "training", "verl"),
    Package("hydra-core", "hydra", "verl's configuration", "training", "verl"),
    Package("peft", "peft", "LoRA adapters; verl imports it always", "training", "verl"),
    Package("tensordict", "tensordict", "batches in verl", "training", None),
    Package("TransferQueue", "transfer_queue", "samples on their way in verl", "training", "verl"),
    Package(
        "vllm", "vllm", "rollout.name=vllm (rollout.name=longstraw does without)", "optional", "gpu"
    ),
    Package(
        "flash-attn",
        "flash_attn",
        "verl's default attn_implementation on a GPU (the override "
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa does without)",
        "optional",
        "gpu",
    ),
    Package(
        "flash-linear-attention",
        "fla",
        "gated-delta-net layers on a GPU (Qwen3.5, Qwen3-Next)",
        "optional",
        "gpu",
    ),
    Package(
        "triton",
        "triton",
        "compiled kernels on a GPU (CUDA builds of torch bring it)",
        "optional",
        None,
    ),
)


def installed_version(package: Package) -> str | None:
    """The version, ``unknown`` for a module without metadata, None if it can't be imported."""
    if importlib.util.find_spec(package.module) is None:
        return None
    try:
        return metadata.version(package.name)
    except metadata.PackageNotFoundError:
        return "unknown"


def _requirements(holder: str) -> list[Requirement]:
    """What ``holder`` asks for here: with any extra if it is ours, else without."""
    try:
        lines = metadata.requires(holder) or []
        extras = ["", *(metadata.metadata(holder).get_all("Provides-Extra") or [])]
    except metadata.PackageNotFoundError:
        return []
    every = [Requirement(line) for line in lines]
    tried = extras if holder == OWN else [""]
    return [r for r in every if not r.marker or any(r.marker.evaluate({"extra": e}) for e in tried)]


def wanted_range(name: str) -> SpecifierSet:
    """The versions that all who ask for the package accept."""
    wanted = SpecifierSet()
    for holder in _HOLDERS:
        for requirement in _requirements(holder):
            if canonicalize_name(requirement.name) == canonicalize_name(name):
                wanted &= requirement.specifier
    return wanted


def extra_names(extra: str) -> list[str]:
    """The distributions that an extra of ours brings."""
    return [
        r.name
        for r in _requirements(OWN)
        if r.marker and r.marker.evaluate({"extra": extra}) and not r.marker.evaluate({"extra": ""})
    ]


def python_range() -> tuple[str, SpecifierSet]:
    """This Python's version and the range that we and verl accept."""
    wanted = SpecifierSet()
    for holder in (OWN, "verl"):
        try:
            ranges = metadata.metadata(holder).get_all("Requires-Python") or []
        except metadata.PackageNotFoundError:
            continue
        for text in ranges:
            wanted &= SpecifierSet(text)
    return platform.python_version(), wanted
