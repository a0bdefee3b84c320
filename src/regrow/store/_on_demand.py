"""A service that is loaded when it is first asked.

A server that offers services which hardly any job uses should not pay for them, and one of them
that is not installed, or broken, should cost those their answers who ask it, and nobody else
anything. Until it is loaded there is no session that has asked it, and so nothing to tell it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.store._errors import StoreServiceError
from regrow.store._service import Answer, Service, load

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable


class OnDemand:
    """Stands for a service; a `Service` itself.

    Args:
        where: "module:function", as for `load`.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._service: Service | None = None
        self._refusal = ""

    @property
    def deadline(self) -> float | None:
        """See `Service`."""
        return None if self._service is None else self._service.deadline

    def asked(self, session: Hashable, id: int, body: bytes, now: float) -> Iterable[Answer]:
        """See `Service`; loads it.

        Raises:
            StoreServiceError: it cannot be loaded, now or when it was first asked.
        """
        if self._service is None:
            self._service = self._load()
        return self._service.asked(session, id, body, now)

    def cancelled(self, session: Hashable, id: int) -> None:
        """See `Service`."""
        if self._service is not None:
            self._service.cancelled(session, id)

    def suspended(self, session: Hashable, now: float) -> Iterable[Answer]:
        """See `Service`."""
        return () if self._service is None else self._service.suspended(session, now)

    def resumed(self, session: Hashable, now: float) -> Iterable[Answer]:
        """See `Service`."""
        return () if self._service is None else self._service.resumed(session, now)

    def ended(self, session: Hashable, why: str, closed: bool, now: float) -> Iterable[Answer]:
        """See `Service`."""
        return () if self._service is None else self._service.ended(session, why, closed, now)

    def due(self, now: float) -> Iterable[Answer]:
        """See `Service`."""
        return () if self._service is None else self._service.due(now)

    def _load(self) -> Service:
        if not self._refusal:
            try:
                return load(self._where)
            except Exception as error:  # noqa: BLE001 - whatever an import may raise
                # Kept: an import that fails slowly must not hold the server up again and again.
                self._refusal = str(error)
                if not isinstance(error, ValueError):
                    self._refusal = (
                        f"the service {self._where!r} cannot be loaded: "
                        f"{type(error).__name__}: {error}"
                    )
        raise StoreServiceError(self._refusal)
