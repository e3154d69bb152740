"""The training runtime, written against the public names: data, the loop, and what a user sees of it."""

from . import report
from .batches import data_for
from .data import Corpus, Document, corpus
from .load import UsageError, configure, load, place
from .loop import stages, train
from .progress import Progress
from .reader import NonFiniteLoss
from .settings import Settings, resolve
from .state import Keeping
from .stop import Stop, Stopped

__all__ = [
    "Corpus",
    "Document",
    "Keeping",
    "NonFiniteLoss",
    "Progress",
    "Settings",
    "Stop",
    "Stopped",
    "UsageError",
    "configure",
    "corpus",
    "data_for",
    "load",
    "place",
    "report",
    "resolve",
    "stages",
    "train",
]
