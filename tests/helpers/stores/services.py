"""A service for the tests of the store; it records its calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from regrow.store import Answer, StoreServiceError


class Notebook:
    """A service that parks questions until another client asks for their answers.

    A question `park:NAME` waits for `answer:NAME`, which answers all questions with that name.
    `echo:TEXT` is answered at once, `refuse` is refused, `raise` raises, `alarm:SECONDS` sets a
    deadline, and `do:NAME` calls one of `actions`.
    """

    def __init__(self, actions: dict[str, Callable[[], object]] | None = None) -> None:
        self.calls: list[str] = []
        self.parked: dict[tuple[Hashable, int], str] = {}
        self.deadline: float | None = None
        self.raise_when_due = False
        self.actions = actions or {}

    def asked(self, session: Hashable, id: int, body: bytes, now: float) -> list[Answer]:
        word, _, name = body.decode().partition(":")
        self.calls.append(body.decode())
        match word:
            case "park":
                assert (session, id) not in self.parked, "the same question twice"
                self.parked[session, id] = name
                return []
            case "answer":
                woken = [key for key, waits in self.parked.items() if waits == name]
                for key in woken:
                    del self.parked[key]
                answers = [Answer(*key, f"woken:{name}".encode()) for key in woken]
                return [Answer(session, id, b"%d" % len(woken)), *answers]
            case "refuse":
                raise StoreServiceError("it does not want to")
            case "raise":
                raise ZeroDivisionError("a mistake")
            case "alarm":
                self.deadline = now + float(name)
            case "do":
                self.actions[name]()
            case "long":
                return [Answer(session, id, bytes(int(name)))]
        return [Answer(session, id, body)]

    def cancelled(self, session: Hashable, id: int) -> None:
        self.calls.append("cancelled")
        del self.parked[session, id]

    def suspended(self, session: Hashable, now: float) -> list[Answer]:
        self.calls.append("suspended")
        for key in [key for key in self.parked if key[0] == session]:
            del self.parked[key]
        return []

    def resumed(self, session: Hashable, now: float) -> list[Answer]:
        self.calls.append("resumed")
        return []

    def ended(self, session: Hashable, why: str, closed: bool, now: float) -> list[Answer]:
        self.calls.append(f"ended: {why}" if closed else f"ended, not closed: {why}")
        for key in [key for key in self.parked if key[0] == session]:
            del self.parked[key]
        return []

    def due(self, now: float) -> list[Answer]:
        assert self.deadline is not None
        assert now >= self.deadline, "called before its time"
        self.calls.append("due")
        if self.raise_when_due:
            raise ZeroDivisionError("a mistake")
        self.deadline = None
        return []
