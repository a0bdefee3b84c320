"""Reports about a rank from its host's monitor to the store."""

from __future__ import annotations

from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.service_link import ServiceLink
from regrow.store import StoreClient

SECONDS = 5.0


def report_dead(
    client: StoreClient, link: ServiceLink, rank: int, kind: str, message: str, group: str = "group"
) -> None:
    """Report a rank as dead; `link` is the link of its process."""
    question = messages.ReportDead(group, rank, link.process, kind, message)
    client.ask(messages.NAME, messages.encode(question), SECONDS)


def report_overdue(
    client: StoreClient,
    link: ServiceLink,
    rank: int,
    iteration: int,
    message: str,
    group: str = "group",
) -> None:
    """Report the soft time-out of a rank; `link` is the link of its process."""
    question = messages.Report(
        group, rank, link.process, iteration, messages.OVERDUE, "SOFT_TIMEOUT", message
    )
    client.ask(messages.NAME, messages.encode(question), SECONDS)
