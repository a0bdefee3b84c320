"""torch's path `timer.api`."""

from regrow.timer._api import RequestQueue, TimerClient, TimerRequest, TimerServer
from regrow.timer._expires import configure, expires

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]
