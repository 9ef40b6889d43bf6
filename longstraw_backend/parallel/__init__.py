"""Work that ranks do together."""

from .layout import Layout
from .lockstep import Lockstep

__all__ = ["Layout", "Lockstep"]
