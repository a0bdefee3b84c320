"""What torch's flight recorder has of the collectives of this process, as a file.

The recorder keeps the last collectives where TORCH_FR_BUFFER_SIZE says how many. It is read while
the main thread may be blocked in one of them, without Python's lock; so without stacks, for which
the recorder would want that.
"""

from __future__ import annotations

from pathlib import Path

from regrow.utils import get_logger

logger = get_logger(__name__)


def write_trace(folder: str, iteration: int) -> None:
    """Write the collectives that are under way to `FOLDER/iter_ITERATION/_dump_RANK.json`.

    Nothing is written without a process group, or by a torch that has no such recorder (before
    2.8). What fails is logged: an abort is due, which a trace must not keep back.

    Args:
        folder: made if it is not there.
        iteration: of the wrapped function.
    """
    import torch._C._distributed_c10d as recorder
    from torch import distributed

    read = getattr(recorder, "_dump_fr_trace_json", None)
    if read is None or not distributed.is_initialized():
        return
    try:
        path = Path(folder, f"iter_{iteration}", f"_dump_{distributed.get_rank()}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read(includeCollectives=True, onlyActive=True))
    except Exception as error:  # noqa: BLE001 - also the recorder's own
        logger.warning("the trace of torch's collectives cannot be written: %s", error)
