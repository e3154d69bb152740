"""Weights of other programs: Hugging Face models, safetensors files and Orbax checkpoints, read and written."""

from __future__ import annotations

from ..checkpoint.convert import export_orbax, export_safetensors, import_orbax, import_safetensors
from .config import HubConfig
from .export import export_hugging_face
from .load import import_hugging_face
from .table import HuggingFace

__all__ = [
    "HubConfig",
    "HuggingFace",
    "export_hugging_face",
    "export_orbax",
    "export_safetensors",
    "import_hugging_face",
    "import_orbax",
    "import_safetensors",
]
