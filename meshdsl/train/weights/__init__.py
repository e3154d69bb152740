"""Weights of other programs: Hugging Face directories, read into sharded parameters and written back."""

from .config import HubConfig
from .export import export_hugging_face
from .load import import_hugging_face
from .table import HuggingFace

__all__ = ["HubConfig", "HuggingFace", "export_hugging_face", "import_hugging_face"]
