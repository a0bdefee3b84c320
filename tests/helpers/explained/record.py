"""Record the events of real failures, and the pages about them.

`tests/explain/stories` has, for each failure, the events of the job (a log for each host) and the
page. `python -m helpers.explained.record NAME ...` records jobs again; with `--pages` it writes the
pages again, from the recorded events.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import regrow
from helpers.explained.lost_hosts import HOST_SCENARIOS
from helpers.explained.lost_hosts import run as run_on_hosts
from helpers.explained.scenarios import SCENARIOS, run
from regrow.events import read_events
from regrow.explain import explain, list_of, page

STORIES = Path(__file__).parents[2] / "explain" / "stories"
DAY_S = 1_790_000_000.0  # time of day at which each recorded job starts
_VOLATILE = {"page", "agent", "start_ticks"}


def stories() -> list[str]:
    """Return the names of the recorded failures."""
    return sorted(path.name for path in STORIES.iterdir() if path.is_dir())


def text_of(name: str) -> str:
    """Return the pages about a recorded job: the list, if it has several failures, then each."""
    logs = {path.name: list(read_events(path)) for path in sorted((STORIES / name).glob("*.jsonl"))}
    found = list(explain(logs).values())[-1]
    pages = [page(each, len(found)) for each in found]
    parts = pages if len(pages) == 1 else [list_of(found), *pages]
    return "\n\n\n".join(parts) + "\n"


def in_utc() -> None:
    """Show times of day in UTC, from now on."""
    os.environ["TZ"] = "UTC"
    time.tzset()


def write_page(name: str) -> None:
    (STORIES / f"{name}.txt").write_text(text_of(name))


def record(name: str, logs: list[Path], replaced: Mapping[str, str]) -> None:
    """Keep the events of a job, with the paths, names and times of every recorded job.

    Args:
        name: the failure.
        logs: the log of each host.
        replaced: what to write in place of texts of this machine.
    """
    folder = STORIES / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.jsonl"):
        old.unlink()
    found = [list(read_events(log, lambda line: None)) for log in logs]
    first = min(events[0]["time"] for events in found)
    for number, events in enumerate(found):
        lines = [json.dumps(_plain(event, DAY_S - first)) for event in events]
        text = "".join(f"{line}\n" for line in lines)
        for here, shown in replaced.items():
            text = text.replace(here, shown)
        (folder / f"host{number}.jsonl").write_text(text)
    write_page(name)


def _plain(event: dict[str, Any], delay: float) -> dict[str, Any]:
    kept = {key: value for key, value in event.items() if key not in _VOLATILE}
    return kept | {"time": kept["time"] + delay, "run_id": "demo"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="failures; default: all")
    parser.add_argument("--pages", action="store_true", help="only write the pages again")
    args = parser.parse_args()
    in_utc()
    for name in args.names or (stories() if args.pages else [*SCENARIOS, *HOST_SCENARIOS]):
        if not args.pages:
            with tempfile.TemporaryDirectory() as top:
                folder = Path(top, "job")
                if name in SCENARIOS:
                    run(SCENARIOS[name], folder)
                    logs = sorted(folder.glob("runs/*/events.jsonl"))
                else:
                    logs = run_on_hosts(HOST_SCENARIOS[name], folder)
                ids = {log.parent.name: "demo" for log in logs}
                host = os.uname().nodename
                names = {str(folder): "/home/user/job", f'"host": "{host}"': '"host": "node0"'}
                names |= {str(Path(regrow.__file__).parents[1]): "/usr/lib/python3/dist-packages"}
                names |= {"rendezvous 'job'": "rendezvous 'demo'"}
                names |= {f"on {host} ": "on node0 ", f"/{host}": "/node0"}
                record(name, logs, names | ids)
                print(f"{name}: {len(logs)} logs", flush=True)
        else:
            write_page(name)


if __name__ == "__main__":
    main()
