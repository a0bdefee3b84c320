"""The ledger of a job: each worker-second in exactly one bucket, from the events alone.

`build_ledgers` is a pure function of the events; `read_ledgers` reads the logs, and asks this host
whether an agent without a recorded end still runs. A `Ledger` has the totals and the spans of each
worker, from which views draw a timeline.

`buckets` has the names. `regrow.events.runs` groups logs into jobs, and `attempts` the events of a
run. `spans` divides the time of a run, and `split` the time of a process, by the account that the
worker keeps (`regrow._accounts`). `lost` adds up what a fault cost.
"""

from regrow.events import Session as Session
from regrow.events import jobs_of as jobs_of
from regrow.events import runs_of as runs_of
from regrow.ledger.buckets import MEANINGS, PRODUCTIVE, UNKNOWN, is_phase, title
from regrow.ledger.ledger import Ledger, build_ledgers
from regrow.ledger.lost import SURVIVED as SURVIVED
from regrow.ledger.lost import LostTime as LostTime
from regrow.ledger.lost import lost_time as lost_time
from regrow.ledger.reading import agent_is_alive as agent_is_alive
from regrow.ledger.reading import find_logs, read_ledgers
from regrow.ledger.reading import read_logs as read_logs
from regrow.ledger.spans import Span
from regrow.ledger.table import render

__all__ = [
    "MEANINGS",
    "PRODUCTIVE",
    "UNKNOWN",
    "Ledger",
    "Span",
    "build_ledgers",
    "find_logs",
    "is_phase",
    "read_ledgers",
    "render",
    "title",
]
