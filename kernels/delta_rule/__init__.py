"""The gated delta rule with an initial and a final state; see ``api.py`` for the maths."""

from .api import gated_delta_rule
from .choice import IMPLS, Impl, choose_impl

__all__ = ["IMPLS", "Impl", "choose_impl", "gated_delta_rule"]
