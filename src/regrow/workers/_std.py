"""Which of a worker's streams are meant, for all of them or for each."""

from __future__ import annotations

from enum import IntFlag


class Std(IntFlag):
    """Which of a worker's streams; values combine."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Read a flag's text.

        Args:
            vm: a value from 0 to 3 for all ranks (1 is stdout, 2 stderr, 3 both), or
                `local_rank:value` pairs such as `0:3,1:0`.

        Returns:
            The value, or a map of the ranks that are named.

        Raises:
            ValueError: it is neither.
        """
        values = {str(int(std)): std for std in (cls.NONE, cls.OUT, cls.ERR, cls.ALL)}
        if vm in values:
            return values[vm]
        ranks: dict[int, Std] = {}
        for pair in vm.split(","):
            rank, _, value = pair.partition(":")
            if not (rank.isascii() and rank.isdecimal()) or value not in values:
                raise ValueError(
                    rf"{vm} does not match: <^[0123]$> or <^(\d+:[0123],)*(\d+:[0123])$>"
                )
            ranks[int(rank)] = values[value]
        return ranks


def to_map(val_or_map: Std | dict[int, Std], local_world_size: int) -> dict[int, Std]:
    """A value per local rank; ranks that a given map leaves out get `Std.NONE`.

    Args:
        val_or_map: one value for all, or values by local rank.
        local_world_size: number of local ranks.
    """
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {rank: val_or_map.get(rank, Std.NONE) for rank in range(local_world_size)}
