"""torch's path `timer.file_based_local_timer`."""

from regrow.timer._file_client import FileTimerClient
from regrow.timer._file_request import FileTimerRequest
from regrow.timer._file_server import FileTimerServer

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]
