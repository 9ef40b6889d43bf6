"""Work that ranks do together."""

from .lockstep import Lockstep

__all__ = ["Lockstep"]
