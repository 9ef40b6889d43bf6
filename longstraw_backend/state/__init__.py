"""Resident state: what later tokens need of earlier ones, and nothing else."""

from .layer import LayerState, NewLayerState
from .pages import KVPages, TokenPages
from .recurrent import Recurrent, RecurrentState
from .segment import Segment
from .store import PromptKey, PromptStore

__all__ = [
    "KVPages",
    "LayerState",
    "NewLayerState",
    "PromptKey",
    "PromptStore",
    "Recurrent",
    "RecurrentState",
    "Segment",
    "TokenPages",
]
