"""Planted bugs of the witness: each is a small patch of its rules, its keepers or its directory."""

from __future__ import annotations

from typing import Any
from unittest import mock

from msgspec.structs import replace

from regrow.rendezvous.protocol.witness import Ballot
from regrow.rendezvous.server import witness_keeper
from regrow.rendezvous.server.server_messages import CopyReply
from regrow.rendezvous.server.witness_keeper import WitnessKeeper
from simulator.agent import Agent
from simulator.witness import SimBallot, SimDirectory


def a_ballot_is_written_without_compare() -> list[Any]:
    """A keeper or a candidate overwrites what it has not read."""

    def store(self: SimBallot, version: int, ballot: Ballot, *, create: bool = False) -> bool:
        def do() -> bool:
            self.versions(create=create).append(ballot)
            return True

        return self.call(do)

    return [mock.patch.object(SimBallot, "replace", store)]


def a_witness_confirms_before_it_writes() -> list[Any]:
    """A keeper confirms changes, and writes them a moment later."""
    real = SimBallot.replace

    def store(self: SimBallot, version: int, ballot: Ballot, *, create: bool = False) -> bool:
        if ballot.granted_to or create:
            return real(self, version, ballot, create=create)

        def do() -> None:
            versions = self.versions()
            if len(versions) == version:
                versions.append(ballot)

        self.sim.after(self.sim.random.uniform(0.0, 3.0), do)
        return True

    return [mock.patch.object(SimBallot, "replace", store)]


def a_witness_forgets_its_grant() -> list[Any]:
    """A witness follows the old coordinator although it has granted a newer epoch."""
    real = WitnessKeeper._request

    def request(self: Any, task: Any, ballot: Any, checked: int) -> Any:
        known = None if ballot is None else replace(ballot, promised=ballot.epoch)
        return real(self, task, known, checked)

    return [
        mock.patch.object(witness_keeper, "may_follow", return_value=True),
        mock.patch.object(WitnessKeeper, "_request", request),
    ]


def two_directories_are_one_witness() -> list[Any]:
    """Each host has a directory of its own, and no keeper has to find what the other one wrote."""

    def ballot(self: SimDirectory, agent: Agent, id: str) -> SimBallot:
        return SimBallot(self, agent, f"{agent.host.name} {id}")

    real = WitnessKeeper._ask

    def ask(self: Any, *args: Any) -> Any:
        reply = real(self, *args)
        return replace(reply, creates=True) if isinstance(reply, CopyReply) else reply

    return [
        mock.patch.object(SimDirectory, "ballot", ballot),
        mock.patch.object(WitnessKeeper, "_ask", ask),
    ]
