"""The group transaction: capture, score, replay, pop; and decode on a branch."""

from .advance import advance
from .batch import BatchRun
from .decode import Sample, Sampling, decode, generate
from .group import GroupWalk, capture_prompt, replay, score
from .meter import Meter

__all__ = [
    "BatchRun",
    "GroupWalk",
    "Meter",
    "Sample",
    "Sampling",
    "advance",
    "capture_prompt",
    "decode",
    "generate",
    "replay",
    "score",
]
