"""torch's path `timer.local_timer`."""

from regrow.timer._local import LocalTimerServer, MultiprocessingRequestQueue
from regrow.timer._local_client import LocalTimerClient

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]
