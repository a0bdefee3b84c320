"""Callbacks that connect training frameworks with regrow.

`regrow.integrations.lightning` is for PyTorch Lightning, `regrow.integrations.transformers` for the
Trainer of Hugging Face Transformers. Each needs its framework, and is imported by the user's script
only. Both callbacks do the same: they report each optimizer step (`regrow.step`), they name the
time that the framework spends outside of a step (`regrow.phase`: "data", "eval", "checkpoint"), and
they end the training early where `regrow.should_stop` says so.
"""
