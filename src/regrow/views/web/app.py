"""The page's addresses: files of the page, and data about jobs as JSON and as server-sent events.

The files of the page are the same for everybody. Data needs the token, in the header
`Authorization: Bearer TOKEN`. The page gets the token in the fragment of its address, which a
browser sends to no server, and keeps it for its own origin. So there is no cookie that another
server on the same host could receive.

Only GET and HEAD are answered, and no request changes anything. Functions that read files run in
threads, so a file system that hangs delays the views of one job only.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from hmac import compare_digest
from pathlib import Path
from time import monotonic
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regrow.events import NO_ID
from regrow.utils import date_stamp
from regrow.views.account import Accounts
from regrow.views.job_snapshot import Snapshot
from regrow.views.logs import STREAMS, LogName, LogReader, log_files
from regrow.views.runs import Job, Library
from regrow.views.watch import JobWatch

SAMPLE_S = 0.25
"""Seconds between two samples of a running job."""
IDLE_S = 2.0
"""The same for a job that is over, and for the list of jobs."""
QUIET_S = 15.0
"""Most seconds without a byte on a connection that waits for news."""
MOST_WATCHED = 32
"""Most jobs that are followed at the same time."""
MOST_RESTARTS = 200
"""Most restarts that a page gets, the latest ones."""
MOST_ATTEMPTS = 1_000
"""The same for attempts; each start of the workers of a node counts."""
STATIC = Path(__file__).with_name("static")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src 'self' blob:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    # One request a connection: `server.Connection` limits the time until the request is there.
    "Connection": "close",
}
_NUMBER = re.compile("[0-9]{1,9}")


def make_app(library: Library, token: str) -> Starlette:
    """Create the application.

    Args:
        library: the jobs to show.
        token: the secret that a request for data must contain.
    """
    desk = _Desk(library)
    routes = [
        Route("/api/jobs", desk.jobs, methods=["GET"]),
        Route("/api/jobs/live", desk.jobs_live, methods=["GET"]),
        Route("/api/jobs/{key}", desk.job, methods=["GET"]),
        Route("/api/jobs/{key}/live", desk.job_live, methods=["GET"]),
        Route("/api/jobs/{key}/account", desk.account, methods=["GET"]),
        Route("/api/jobs/{key}/logs", desk.logs, methods=["GET"]),
        Route(
            "/api/jobs/{key}/logs/{run}/{attempt}/{local_rank}/{stream}/live",
            desk.log_live,
            methods=["GET"],
        ),
        Mount("/", StaticFiles(directory=STATIC, html=True)),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _refused})
    app.add_middleware(_Guard, token=token)
    return app


def _json(value: Any) -> Response:
    """Return data as JSON in ASCII; `JSONResponse` refuses the name of a file that is no UTF-8."""
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


class _Guard:
    """Middleware: checks the token of requests for data, and adds `HEADERS` to each response."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        response: ASGIApp = self._app
        if scope["path"].startswith("/api/") and not self._is_allowed(scope):
            response = JSONResponse({"error": "the token is missing or wrong"}, 401)
        await response(scope, receive, send_with_headers)

    def _is_allowed(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return compare_digest(given, b"Bearer " + self._token)


class _Desk:
    """Answers requests for data."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lock = asyncio.Lock()  # guards `_library` and `_watched`
        self._watched: dict[str, _Watched] = {}

    async def jobs(self, request: Request) -> Response:
        return _json(await self._jobs())

    async def jobs_live(self, request: Request) -> Response:
        async def samples() -> tuple[str, bool]:
            return json.dumps(await self._jobs()), True

        return _events(samples)

    async def job(self, request: Request) -> Response:
        watched = await self._watch(request)
        text, _ = await watched.snapshot()
        return Response(text, media_type="application/json")

    async def job_live(self, request: Request) -> Response:
        return _events((await self._watch(request)).snapshot)

    async def account(self, request: Request) -> Response:
        text = await (await self._watch(request)).account()
        return Response(text, media_type="application/json")

    async def logs(self, request: Request) -> Response:
        job = (await self._watch(request)).job
        found = await run_in_threadpool(log_files, [run.directory for run in job.runs])
        return _json([{**name._asdict(), "size": size} for name, size in found])

    async def log_live(self, request: Request) -> Response:
        watched, values = await self._watch(request), request.path_params
        numbers = [values[each] for each in ("run", "attempt", "local_rank")]
        if not all(_NUMBER.fullmatch(each) for each in numbers):
            raise HTTPException(404, "there is no such file")
        run, attempt, local_rank = map(int, numbers)
        name = LogName(run, attempt, local_rank, values["stream"])
        runs = watched.job.runs
        if name.run >= len(runs) or name.stream not in STREAMS:
            raise HTTPException(404, "there is no such file")
        reader = LogReader(runs[name.run].directory, name)
        try:
            first = await run_in_threadpool(reader.read)
        except OSError as error:
            raise HTTPException(404, "there is no such file") from error
        return StreamingResponse(_lines(reader, first), media_type="text/event-stream")

    async def _jobs(self) -> list[dict[str, Any]]:
        async with self._lock:
            jobs = await run_in_threadpool(self._library.jobs)
            return [await run_in_threadpool(_summary, job, self._library) for job in jobs]

    async def _watch(self, request: Request) -> _Watched:
        key = request.path_params["key"]
        async with self._lock:
            if (known := self._watched.get(key)) is not None:
                return known
            job = await run_in_threadpool(self._library.job, key)
            if job is None:
                raise HTTPException(404, "there is no such job")
            if len(self._watched) >= MOST_WATCHED:  # the one that nobody has read for longest
                idle = min(self._watched, key=lambda each: self._watched[each].read_at)
                self._watched.pop(idle).close()
            # Its own library, because a library is not thread-safe.
            watched = _Watched(JobWatch(self._library.another(), job), self._library)
            self._watched[key] = watched
            return watched


class _Watched:
    """A job that pages follow: one sample serves all of them."""

    def __init__(self, watch: JobWatch, library: Library) -> None:
        self._watch, self._remote = watch, library.remote
        self._lock = asyncio.Lock()
        self._accounts, self._account_lock = Accounts(library.remote), asyncio.Lock()
        self._text, self._is_over, self._events = "", False, 0
        self.read_at = float("-inf")
        """Monotonic time of the latest sample."""

    @property
    def job(self) -> Job:
        return self._watch.job

    def close(self) -> None:
        """Release what the job's pages used."""
        self._watch.close()

    async def snapshot(self) -> tuple[str, bool]:
        """Return the job as JSON, and whether it is over."""
        async with self._lock:
            if monotonic() - self.read_at >= SAMPLE_S / 2:
                found = await run_in_threadpool(self._read)
                self._text, self._is_over, self._events = found
                self.read_at = monotonic()
        return self._text, self._is_over

    async def account(self) -> str:
        """Return the ledger and the explanations of the job as JSON."""
        await self.snapshot()
        async with self._account_lock:
            return await run_in_threadpool(self._read_account)

    def _read_account(self) -> str:
        return json.dumps(self._accounts.read(self.job, self._events), separators=(",", ":"))

    def _read(self) -> tuple[str, bool, int]:
        found = self._watch.snapshot()
        fault = None if self._remote is None else "" if found.is_over else self._remote.fault()
        data = {**as_data(found), "fault": fault}  # null: no endpoint was given
        return json.dumps(data, separators=(",", ":")), found.is_over, found.events


def as_data(snapshot: Snapshot) -> dict[str, Any]:
    """Return the snapshot as the page gets it: the latest attempts and restarts, ranks as rows.

    Rows are a quarter as long as objects. The story has times of this host's time zone, so the
    other times that the page shows are texts of this zone too, whatever the zone of the browser.
    """
    since = min(sorted(each.started for each in snapshot.attempts)[-MOST_ATTEMPTS:], default=0.0)
    shown = replace(
        snapshot,
        restarts=snapshot.restarts[-MOST_RESTARTS:],
        attempts=tuple(each for each in snapshot.attempts if each.started >= since),
    )
    data = shown.to_json()
    data["run_id"] = None if snapshot.run_id == NO_ID else snapshot.run_id
    data["restart_count"] = sum(restart.restarted for restart in snapshot.restarts)
    data["started_text"] = date_stamp(data["started"])
    for node in data["nodes"]:
        silent = node["answered_s"]  # whole seconds, because a page draws again what has changed
        node["answered_s"] = silent and (int(silent) if silent >= 2 else 0)
        node["last_text"] = date_stamp(node["last"])
        node["incident_text"] = date_stamp(node["incident_at"])
    ranks = data.pop("ranks")
    columns = list(ranks[0]) if ranks else []
    rows = [[_short(value) for value in rank.values()] for rank in ranks]
    return {**data, "ranks": {"columns": columns, "rows": rows}}


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _summary(job: Job, library: Library) -> dict[str, Any]:
    """Return a row of the list of jobs."""
    alive = [library.is_alive(run) for run in job.runs]
    ends = [run.finished for run in job.runs if run.finished is not None]
    if any(alive):
        state = "running"
    elif ends:
        state = ends[-1].lower()
    else:
        state = "killed" if all(each is False for each in alive) else "unknown"
    return {
        "key": job.key,
        "run_id": job.run_id,
        "script": job.runs[0].script,
        "hosts": sorted({run.host for run in job.runs}),
        "started": date_stamp(job.runs[0].started),
        "last": date_stamp(max(run.last for run in job.runs)),
        "state": state,
    }


def _events(sample: Callable[[], Awaitable[tuple[str, bool]]]) -> Response:
    """Return a response that sends each new sample.

    Args:
        sample: returns a text, and whether it will rarely change.
    """

    async def changes() -> AsyncIterator[str]:
        before, sent_at = "", monotonic()
        while True:
            text, rarely = await sample()
            if text != before:
                before, sent_at = text, monotonic()
                yield f"data: {text}\n\n"
            elif monotonic() - sent_at >= QUIET_S:
                sent_at = monotonic()
                yield ":\n\n"
            await asyncio.sleep(IDLE_S if rarely else SAMPLE_S)

    return StreamingResponse(changes(), media_type="text/event-stream")


async def _lines(reader: LogReader, first: bytes) -> AsyncIterator[str]:
    from codecs import getincrementaldecoder

    decoder = getincrementaldecoder("utf-8")("replace")
    data, sent_at = first, float("-inf")
    while True:
        if data or monotonic() - sent_at >= QUIET_S:
            sent_at = monotonic()
            yield f"data: {json.dumps(decoder.decode(data))}\n\n"
        try:
            data = await run_in_threadpool(reader.read)
        except OSError:  # the file is gone
            return
        if not data:
            await asyncio.sleep(SAMPLE_S)
