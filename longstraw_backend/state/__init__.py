"""Resident state: what later tokens need of earlier ones, and nothing else."""

from .latent import LatentPage, LatentPages
from .layer import LayerState, NewLayerState
from .pages import KVPages, TokenPages
from .placement import ON_DEVICE, STATE_KINDS, Placement, StateKind
from .recurrent import Recurrent, RecurrentState
from .segment import Segment
from .store import PromptKey, PromptStore

__all__ = [
    "ON_DEVICE",
    "STATE_KINDS",
    "KVPages",
    "LatentPage",
    "LatentPages",
    "LayerState",
    "NewLayerState",
    "Placement",
    "PromptKey",
    "PromptStore",
    "Recurrent",
    "RecurrentState",
    "Segment",
    "StateKind",
    "TokenPages",
]
