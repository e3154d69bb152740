"""The training runtime behind `meshdsl train`: data, the loop, checkpoints, metrics and progress."""

from ..errors import UsageError
from ..metric import Metric, combine, maximum, mean, minimum, norm, same, total
from .adapters import from_datasets, from_grain
from .batches import data_for, data_of_bytes
from .data import Corpus, Document, corpus
from .documents import Documents, read_rows
from .iterators import Iterated, Stateful
from .load import load, mesh_and_layout
from .loop import train
from .progress import Progress
from .reader import NonFiniteLoss
from .settings import Settings, configure, resolve
from .state import Keeping
from .step import stages
from .stop import Stop, Stopped
from .tokenizer import load_tokenizer, write_tokens
from .tokens import TokenFiles

__all__ = [
    "Corpus",
    "Document",
    "Documents",
    "Iterated",
    "Keeping",
    "Metric",
    "NonFiniteLoss",
    "Progress",
    "Settings",
    "Stateful",
    "Stop",
    "Stopped",
    "TokenFiles",
    "UsageError",
    "combine",
    "configure",
    "corpus",
    "data_for",
    "data_of_bytes",
    "from_datasets",
    "from_grain",
    "load",
    "load_tokenizer",
    "maximum",
    "mean",
    "mesh_and_layout",
    "minimum",
    "norm",
    "read_rows",
    "resolve",
    "same",
    "stages",
    "total",
    "train",
    "write_tokens",
]
