"""Models and their parameters: `md.model`, `md.param`, `md.scope`, and the initialisers of `md.init`."""

from .model import Model, model
from .param import Declared, ModelRun, current_run, param, running, running_model, scope

__all__ = ["Declared", "Model", "ModelRun", "current_run", "model", "param", "running", "running_model", "scope"]
