"""The training runtime, written against the public names: data, the loop, and what a user sees of it."""

from . import report
from .data import Corpus, Document, corpus
from .load import UsageError, configure, load, place
from .loop import NonFiniteLoss, data_for, stages, train
from .progress import Progress

__all__ = [
    "Corpus",
    "Document",
    "NonFiniteLoss",
    "Progress",
    "UsageError",
    "configure",
    "corpus",
    "data_for",
    "load",
    "place",
    "report",
    "stages",
    "train",
]
