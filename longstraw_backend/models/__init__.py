"""How stock Hugging Face modules are driven over resident state."""

from .drive import DrivenModel, drive
from .families import SUPPORTED, check_supported

__all__ = ["SUPPORTED", "DrivenModel", "check_supported", "drive"]
