"""How agent and guardian talk: frames of byte strings, and nothing that could run code.

A frame is its length and then fields, each its length and its bytes; lengths are four bytes, little
end first. A field is a word, a number in decimal, or bytes as the kernel takes them: arguments
and environments need not be UTF-8, which rules JSON out, and the guardian has no use for a parser.
Both ends are ours, but a length is still checked before memory is set aside for it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` costs more to import than the rest of the guardian
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Far above what `execve` takes (an argument list and environment of a few MB).
MAX_FRAME = 64 << 20


def encode(fields: Iterable[bytes | int]) -> bytes:
    """One frame of `fields`.

    Raises:
        ValueError: the frame would exceed `MAX_FRAME` bytes.
    """
    body = bytearray()
    for field in fields:
        data = b"%d" % field if isinstance(field, int) else field
        body += len(data).to_bytes(4, "little")
        body += data
    if len(body) > MAX_FRAME:
        raise ValueError(
            f"a message of {len(body)} bytes exceeds the guardian's limit of {MAX_FRAME}: shorten "
            "the worker's arguments or environment"
        )
    return len(body).to_bytes(4, "little") + body


class Decoder:
    """Cuts a stream of bytes into frames."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[list[bytes]]:
        """The frames that `data` completes.

        Raises:
            ValueError: a length is beyond what a frame or its rest may hold.
        """
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "little")
            if size > MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes exceeds the limit of {MAX_FRAME}")
            if len(self._buffer) < 4 + size:
                return
            body = bytes(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            yield _fields(body)


def _fields(body: bytes) -> list[bytes]:
    fields, at = [], 0
    while at < len(body):
        end = at + 4 + int.from_bytes(body[at : at + 4], "little")
        if end > len(body) or at + 4 > len(body):
            raise ValueError(f"a field at byte {at} ends beyond its frame of {len(body)} bytes")
        fields.append(body[at + 4 : end])
        at = end
    return fields
