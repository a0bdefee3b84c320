"""Exceptions as a user's program may raise them: reading their texts or attributes raises."""

from __future__ import annotations

from typing import Any

__all__ = [
    "UNSPEAKABLE",
    "Classless",
    "Falsy",
    "NoText",
    "Sealed",
    "Surrogate",
    "Unnotable",
    "Unspeakable",
]


class Unspeakable(Exception):
    """Its texts raise, like those of a CUDA tensor after a CUDA error."""

    def __repr__(self) -> str:
        raise RuntimeError("CUDA error: device-side assert triggered")

    __str__ = __repr__


class NoText(Exception):
    """Its text methods return no strings."""

    def __repr__(self) -> Any:
        return 3

    __str__ = __repr__


class Surrogate(Exception):
    """Its text cannot be encoded."""

    def __str__(self) -> str:
        return "the file \udc80"

    __repr__ = __str__


class Unnotable(Exception):
    """Reading its notes raises."""

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        raise OSError("the notes are on a disk that is gone")


class Sealed(Exception):
    """Reading its cause or its traceback raises."""

    @property
    def __cause__(self) -> BaseException | None:  # type: ignore[override]
        raise RuntimeError("no cause is known")

    __context__ = __traceback__ = __cause__  # type: ignore[assignment]


class Classless(Exception):
    """Reading its class raises, so pytest cannot show it."""

    @property  # type: ignore[misc] # as it should not be
    def __class__(self) -> Any:
        raise RuntimeError("no class is known")


class Falsy(Exception):
    """It is false, like an empty collection of errors."""

    def __len__(self) -> int:
        return 0


UNSPEAKABLE: tuple[type[Exception], ...] = (
    *(Unspeakable, NoText, Surrogate, Unnotable, Sealed, Falsy),
)
