"""The ledger and the explanations of a job as `regrow web` shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.views.written_job import WrittenJob
from regrow.events import NO_ID
from regrow.ledger import read_ledgers
from regrow.views import Library
from regrow.views.account import account
from regrow.views.runs import OPEN_S


def test_an_account_is_of_all_runs_that_the_views_take_for_one_job(tmp_path: Path) -> None:
    first = WrittenJob(tmp_path, 1, NO_ID, "a")
    first.start()
    first.fail(0, "ValueError: first")  # then its agent is killed
    log = first.directory / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    earlier = [event | {"time": event["time"] - OPEN_S / 2} for event in events]
    log.write_text("".join(json.dumps(event) + "\n" for event in earlier))
    second = WrittenJob(tmp_path, 1, NO_ID, "b")
    second.start()
    second.fail(0, "ValueError: second")
    second.finish("FAILED", 1)
    ledgers = read_ledgers([str(tmp_path)], print)
    assert len(ledgers) == 2
    (job,) = Library([str(tmp_path)]).jobs()
    found = account(job, None)
    assert found["ledger"]["total_s"] == pytest.approx(sum(ledger.total for ledger in ledgers))
    assert [each["number"] for each in found["explanations"]] == [1, 2]
    titles = [each["title"] for each in found["explanations"]]
    assert ["first" in titles[0], "second" in titles[1]] == [True, True]
