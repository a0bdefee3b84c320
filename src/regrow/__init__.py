"""The names a training script uses."""

__version__ = "0.1.0"
