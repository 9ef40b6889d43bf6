"""How stock Hugging Face modules are driven over resident state."""

from .context import Head, Walk
from .drive import DrivenModel, drive
from .families import SUPPORTED, check_supported

__all__ = ["SUPPORTED", "DrivenModel", "Head", "Walk", "check_supported", "drive"]
