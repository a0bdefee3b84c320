"""The names a training script uses."""

from regrow._progress import step

__version__ = "0.1.0"
__all__ = ["__version__", "step"]
