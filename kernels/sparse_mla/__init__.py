"""Absorbed attention over latents, selected or all of them; see ``api.py`` for the maths."""

from .api import LatentAttention, dense_mla, sparse_mla, sparse_mla_part

__all__ = ["LatentAttention", "dense_mla", "sparse_mla", "sparse_mla_part"]
