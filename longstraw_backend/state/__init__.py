"""Resident state: what later tokens need of earlier ones, and nothing else."""

from .pages import KVPages
from .segment import Segment
from .store import PromptKey, PromptStore

__all__ = ["KVPages", "PromptKey", "PromptStore", "Segment"]
