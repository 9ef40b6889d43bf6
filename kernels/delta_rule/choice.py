"""Which code runs the rule: one choice for a device and dtype, never for a phase of training.

flash-linear-attention's kernel and plain torch round differently, and a few hundred layers of
rounding move a bfloat16 log-prob visibly: scoring and replay must run the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module, util
from importlib.metadata import version
from typing import Literal, get_args

import torch
from packaging.version import Version
from torch import Tensor

from .reference import chunked_rule

__all__ = ["IMPLS", "Impl", "check_fla", "choose_impl", "get_rule"]

Impl = Literal["reference", "fla"]
IMPLS: tuple[str, ...] = get_args(Impl)
Rule = Callable[..., tuple[Tensor, Tensor | None]]
"""From q, k, v, g, beta, state, scale and whether the final state is wanted, to output and state;
as many key as value heads."""

_WRONG_ON_HOPPER = Version("3.4"), Version("3.7.1")


def choose_impl(device: torch.device, dtype: torch.dtype) -> Impl:
    """``fla`` for 16-bit tensors on CUDA, else ``reference``."""
    return "fla" if device.type == "cuda" and dtype.itemsize == 2 else "reference"


def get_rule(impl: Impl) -> Rule:
    """Look a rule up by name.

    Raises:
        ValueError: there is no such rule.
        RuntimeError: see :func:`check_fla`.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(IMPLS)}, got {impl!r}")
    return chunked_rule if impl == "reference" else _fla_rule()


def check_fla(capability: tuple[int, int], triton: str, packages: set[str]) -> None:
    """Raise RuntimeError where flash-linear-attention is missing or its gradients are wrong.

    On Hopper, triton from 3.4 on miscompiles the gated backward (fixed in 3.7.1) unless a second
    implementation of it is installed.

    Args:
        capability: of the CUDA device.
        triton: version.
        packages: which of ``fla``, ``tilelang`` and ``flash_qla`` can be imported.
    """
    if "fla" not in packages:
        raise RuntimeError(
            "gated delta rule: flash-linear-attention is needed for 16-bit tensors on CUDA; "
            "pip install fla-core tilelang flash-qla"
        )
    first, fixed = _WRONG_ON_HOPPER
    if capability == (9, 0) and first <= Version(triton) < fixed:
        if not packages & {"tilelang", "flash_qla"}:
            raise RuntimeError(
                f"gated delta rule: with triton {triton} on Hopper, flash-linear-attention "
                f"computes wrong gradients; pip install tilelang flash-qla, or triton>={fixed}"
            )


@cache
def _fla_rule() -> Rule:
    found = {name for name in ("fla", "tilelang", "flash_qla") if util.find_spec(name)}
    check_fla(torch.cuda.get_device_capability(), version("triton"), found)
    kernel = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    def rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        scale: float,
        final_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        # FlashQLA cuts a long sequence differently when no backward follows, which moves the last
        # bits; scoring and replay must agree, so a backward always seems to follow.
        inputs = (q, k, v, g, beta, state)
        scoring = not (torch.is_grad_enabled() and any(t.requires_grad for t in inputs))
        with torch.enable_grad():
            output, final = kernel(
                (q.detach().requires_grad_() if scoring else q).contiguous(),
                k.contiguous(),
                v.contiguous(),
                g=g,
                beta=beta.to(q.dtype),  # the combination that is widely run
                scale=scale,
                initial_state=state.contiguous(),
                output_final_state=final_state,
            )
        if not scoring:
            return output, final
        return output.detach(), None if final is None else final.detach()

    return rule
