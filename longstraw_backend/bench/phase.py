"""The numbers of one timed pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .flops import Flops

__all__ = ["Phase"]


@dataclass(frozen=True)
class Phase:
    """A pass, its time and its bytes.

    Attributes:
        name: capture, score, forward, backward, ...
        context: captured tokens that it made or stood on.
        tokens: that it ran.
        seconds: wall time, device work waited for.
        flops: by formula.
        roofline_seconds: of the same work at the measured ceilings.
        predicted_bytes: peak on the device by the planner, None if it has none of this pass.
        peak_bytes: peak that was measured, the highest of all ranks; None if it was not.
        sent_bytes: that left this rank for others, and by formula; None if they were not counted.
    """

    name: str
    context: int
    tokens: int
    seconds: float
    flops: Flops
    roofline_seconds: float
    predicted_bytes: int | None = None
    peak_bytes: int | None = None
    sent_bytes: tuple[int, int] | None = None

    @property
    def fraction(self) -> float:
        """Of the roofline."""
        return self.roofline_seconds / self.seconds

    def as_json(self) -> dict[str, Any]:
        """With what follows from them."""
        both = self.predicted_bytes and self.peak_bytes
        return {
            "phase": self.name,
            "context": self.context,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "tflops": self.flops.total / self.seconds / 1e12,
            "flops": self.flops.as_json(),
            "roofline_seconds": self.roofline_seconds,
            "fraction_of_roofline": self.fraction,
            "predicted_bytes": self.predicted_bytes,
            "peak_bytes": self.peak_bytes,
            "predicted_over_measured": (self.predicted_bytes or 0) / (self.peak_bytes or 1)
            if both
            else None,
            "sent_bytes": self.sent_bytes and self.sent_bytes[0],
            "sent_bytes_by_formula": self.sent_bytes and self.sent_bytes[1],
        }
