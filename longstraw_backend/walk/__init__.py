"""The group transaction: capture, score, replay, pop; and decode on a branch."""

from .advance import Block, advance, predict
from .batch import BatchRun
from .capture import GroupWalk, capture_prompt
from .decode import Sample, Sampling, decode, generate
from .meter import Meter

__all__ = [
    "BatchRun",
    "Block",
    "GroupWalk",
    "Meter",
    "Sample",
    "Sampling",
    "advance",
    "capture_prompt",
    "decode",
    "generate",
    "predict",
]
