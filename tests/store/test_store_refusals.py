"""How often a server reports the connections that it refuses: one line per address and minute."""

from __future__ import annotations

import re

from regrow.store.limits import REFUSED_PEERS
from regrow.store.server.log import Refusals


def test_the_first_refusal_of_an_address_is_reported_at_once_and_later_ones_are_counted() -> None:
    refusals = Refusals()
    assert refusals.add("10.0.0.4", "refused 10.0.0.4:1: no token") == (
        "refused 10.0.0.4:1: no token"
    )
    for number in range(2, 16061):
        assert refusals.add("10.0.0.4", f"refused 10.0.0.4:{number}: no token") is None
    assert refusals.end_minute() == [
        "16059 more connections from 10.0.0.4 within a minute; the latest: "
        "refused 10.0.0.4:16060: no token"
    ]


def test_an_address_with_new_refusals_has_a_line_a_minute_and_a_quiet_one_is_forgotten() -> None:
    refusals = Refusals()
    assert refusals.add("a", "refused a") == "refused a"
    for _ in range(9):
        assert refusals.add("a", "refused a") is None
        assert refusals.end_minute() == [
            "1 more connection from a within a minute; the latest: refused a"
        ]
    assert refusals.end_minute() == []
    assert refusals.add("a", "refused a") == "refused a"


def test_each_address_has_a_line_of_its_own_until_there_are_too_many() -> None:
    refusals = Refusals()
    shown = [refusals.add(f"10.0.{n}.1", f"refused {n}") for n in range(10 * REFUSED_PEERS)]
    assert len([line for line in shown if line]) == REFUSED_PEERS + 1
    (rest,) = refusals.end_minute()
    assert re.match(rf"{9 * REFUSED_PEERS - 1} more connections from other addresses within", rest)
