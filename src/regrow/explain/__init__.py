"""One failure on one page: cause, evidence, what regrow did, timeline, cost, and what made it long.

`explain` is a pure function of the events of a job's logs; `read_explanations` reads the logs. An
`Explanation` is of one failure, in-process restart, membership change or end of the job. `page`
shows it as text, `list_of` all of them with one line each, `draw` its timeline as SVG.

The facts are those of the story (`regrow.events.story`); the worker-seconds are those of the ledger
(`regrow.ledger`). `scene` has the events of one run of a job on one clock. `failures`,
`in_process`, `replacements` and `endings` each explain one kind of incident; `findings` has the
evidence for a failure, and `peers` what the other ranks did. `ladder` says why no lower rung was
possible, and `long_settings` which setting decided how long it took.
"""

from regrow.explain.explanation import RUNG_NAMES as RUNG_NAMES
from regrow.explain.explanation import Cost, Explanation, Fact, Held, Phase, Refusal
from regrow.explain.job import explain, read_explanations
from regrow.explain.page import list_of, page
from regrow.explain.page import worker_time as worker_time
from regrow.explain.svg import draw

__all__ = [
    "Cost",
    "Explanation",
    "Fact",
    "Held",
    "Phase",
    "Refusal",
    "draw",
    "explain",
    "list_of",
    "page",
    "read_explanations",
]
