"""Models and training runs as folders: `model_folder` saves and loads models, `atomic_folder` writes all or nothing."""

from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.model_folder import export, load, save

__all__ = ["CheckpointError", "export", "load", "save"]
