"""`rng`: the random number generators of a process, as a part of a state."""

from __future__ import annotations

import random
import struct
import sys
from typing import Any

_WORDS = struct.Struct("<625I")  # state of Python's Mersenne Twister: 624 words and a position


class RandomState:
    """State of the generators that a training uses without naming them."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of `random`, and of numpy and torch if they are imported."""
        version, words, gauss = random.getstate()
        states: dict[str, Any] = {"random": (version, _WORDS.pack(*words), gauss)}
        if (numpy := sys.modules.get("numpy")) is not None:
            states["numpy"] = numpy.random.get_state()
        if "torch" in sys.modules:
            from regrow.state.torch_arrays import generator_states

            states["torch"] = generator_states()
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Set the states of all generators that `states` has."""
        version, words, gauss = states["random"]
        random.setstate((version, _WORDS.unpack(words), gauss))
        if "numpy" in states:
            import numpy as np

            np.random.set_state(states["numpy"])
        if "torch" in states:
            from regrow.state.torch_arrays import set_generator_states

            set_generator_states(states["torch"])


def rng() -> RandomState:
    """Return the random number generators of this process, as a private part of a `State`.

    They are those of `random`, of `numpy.random` if numpy is imported, and of torch if torch is
    imported: its default generator for the CPU, and those of CUDA if the process uses CUDA.
    Generators that the program makes itself are not among them.
    """
    return RandomState()
