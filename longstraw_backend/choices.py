"""Words that options take. Imports nothing, so that a command line can list them without torch."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["STAGINGS", "STATE_KINDS", "CotangentDtype", "Gradient", "Staging", "StateKind"]

Gradient = Literal["response_only", "exact"]
"""With the prompt state held constant, or that of full-sequence training."""
CotangentDtype = Literal["float32", "bfloat16"]
Staging = Literal["segments", "layer"]
"""How pages in CPU memory come to the device; see ``kernels/staging.py``."""
STAGINGS: tuple[str, ...] = get_args(Staging)
StateKind = Literal["attention", "latent", "recurrent"]
"""Keys and values of attention; latents and index keys of MLA; states of gated delta nets."""
STATE_KINDS: tuple[str, ...] = get_args(StateKind)
