"""Attention of new tokens over resident segments; see ``api.py`` for the maths."""

from .api import segment_attention
from .kept import Kept
from .partial import IMPLS, Impl, choose_impl
from .parts import Page

__all__ = ["IMPLS", "Impl", "Kept", "Page", "choose_impl", "segment_attention"]
