"""Resident state: what later tokens need of earlier ones, and nothing else."""

from .latent import LatentPage, LatentPages
from .layer import LayerState, NewLayerState
from .pages import KVPages, TokenPages
from .recurrent import Recurrent, RecurrentState
from .segment import Segment
from .store import PromptKey, PromptStore

__all__ = [
    "KVPages",
    "LatentPage",
    "LatentPages",
    "LayerState",
    "NewLayerState",
    "PromptKey",
    "PromptStore",
    "Recurrent",
    "RecurrentState",
    "Segment",
    "TokenPages",
]
