"""Top-k selection of the sparse-attention indexer; see ``api.py`` for the maths."""

from .api import index_candidates, index_topk
from .select import Candidates, merge_candidates

__all__ = ["Candidates", "index_candidates", "index_topk", "merge_candidates"]
