"""Gated MLPs of experts over tokens grouped by expert; see ``api.py`` for the maths."""

from .api import grouped_experts
from .choice import IMPLS, Impl, choose_impl

__all__ = ["IMPLS", "Impl", "choose_impl", "grouped_experts"]
