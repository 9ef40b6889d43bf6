"""How many bytes a rank has sent to the others that share a prompt with it, by what they were for.

Counted where they leave, in ``exchange.py``: what a rank sends to itself is no traffic. Gathering a
part of b bytes from each of R ranks counts (R - 1) b, what a rank must send if every other gets the
part from it, and also what it receives; a ring passes as many on.

Not counted: what FSDP moves. With parameters of n elements, in the e bytes they compute in, over D
ranks of a shard group, each rank sends, for every pass of the model,

    forward     e n (D - 1) / D       gathers parameters
    backward    e n (D - 1) / D       gathers them again, if they were freed after the forward
                r n (D - 1) / D       scatters sums of gradients, r bytes an element, of those that
                                      are trained, in passes that reduce them

whatever the number of tokens: larger blocks have less of it per token. The agreements of
``Lockstep``, lists of a few numbers, are not counted either.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

__all__ = ["Purpose", "Traffic"]

Purpose = Literal[
    "attention", "latent", "selection", "delta_rule", "experts", "log_probs", "logits", "other"
]
"""Attention over key/value pages; latent attention, sparse or dense; the indexer's selection; gated
delta nets; experts; gathering of log-probs and entropies; of a decoded token's logits; all else."""


class Traffic:
    """Bytes that have left this rank for others.

    No dataclass: FSDP copies those among the arguments of a forward, and counts in the copy.

    Attributes:
        sent: by purpose, since the counter was made.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()

    def add(self, purpose: Purpose, nbytes: int) -> None:
        """Count bytes that leave now."""
        self.sent[purpose] += nbytes

    def since(self, before: Counter[str]) -> Counter[str]:
        """What has been sent since :attr:`sent` was ``before``, a copy of it."""
        return self.sent - before
