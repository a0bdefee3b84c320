"""The page in a real browser: Debian's chromium, driven by playwright. Run by `make views`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from helpers.jobs.e2e_job import Job
from helpers.processes import alive, children_of, wait_until
from helpers.views.served import Served, served
from helpers.views.written_job import WrittenJob
from regrow.events import NO_ID, read_events
from regrow.ledger import MEANINGS, build_ledgers
from regrow.views.account import figures

pytestmark = [pytest.mark.views, pytest.mark.timeout(120)]

SHOWN_S = 1.0
"""Seconds within which the page shows a change, besides those in which processes had to wait."""
TRAIN = """
import regrow
for n in range(1, 10**6):
    time.sleep(0.02)
    regrow.step(n)
    print("rank", RANK, "attempt", ATTEMPT, "step", n, flush=True)
"""
FAILS_ONCE = """
import regrow
for n in range(1, 31):
    regrow.step(n)
    print("rank", RANK, "attempt", ATTEMPT, "step", n, flush=True)
    if (RANK, ATTEMPT, n) == (1, 0, 20):
        raise ValueError("no more")
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # loaded by no other test process

    program = shutil.which("chromium")
    assert program is not None, "chromium is missing: apt-get install chromium"
    with sync_playwright() as driver:
        # Root may not use chromium's sandbox; the pages are our own.
        yield driver.chromium.launch(executable_path=program, args=["--no-sandbox"])


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Open an address in a new page; the test fails if the page logs anything."""
    logged: list[str] = []
    contexts = []

    def open_at(url: str, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda message: logged.append(message.text))
        page.on("pageerror", lambda error: logged.append(str(error)))
        page.goto(url)
        return page

    yield open_at
    for context in contexts:
        context.close()
    # The server of a test may end before its pages are closed.
    assert [text for text in logged if "net::ERR_" not in text] == []


def waited_s() -> float:
    """Return for how many seconds since the boot processes had to wait for a CPU.

    It is 0 on a system that does not count them: a test then needs a machine that is not busy.
    """
    try:
        return int(Path("/proc/pressure/cpu").read_text().split("total=")[1].split()[0]) / 1e6
    except OSError:
        return 0.0


def browser_processes() -> list[int]:
    """Return all processes of the browser."""
    below = [os.getpid()]
    for pid in below:
        below += children_of(pid)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below if alive(pid)}
    return [pid for pid, command in commands.items() if b"chromium" in command.split(b"\0")[0]]


def the_job(page: Any) -> Any:
    """Follow the link to the newest job."""
    page.click("#jobs a")
    page.wait_for_selector("#ranks .rank")
    return page


def assert_step_shown_in_time(page: Any, job: WrittenJob, rank: int, step: int) -> None:
    """Report a step, which is the highest, and assert how long the page takes to show it."""
    begun, waited = time.monotonic(), waited_s()
    job.step(rank, step)
    page.wait_for_function(
        "step => document.querySelectorAll('#overview dd')[1].textContent === String(step)",
        arg=step,
        polling=10,
    )
    took, waited = time.monotonic() - begun, waited_s() - waited
    print(f"step {step}: shown after {took:.3f} s, of which processes waited {waited:.3f} s")
    assert took - waited < SHOWN_S


def fact(page: Any, name: str) -> str:
    """Return a figure of the overview by its name."""
    text: str = page.locator(f"#overview .facts div:has(dt:text-is('{name}')) dd").inner_text()
    return text


def test_the_list_leads_to_a_job_with_all_its_parts(
    open_page: Any, web: Served, job: WrittenJob
) -> None:
    job.step(0, 1234)
    job.log(0, "loss 0.5\n")
    page = the_job(open_page(web.url))
    assert "token" not in page.url
    page.wait_for_selector("text=loss 0.5")
    assert (fact(page, "state"), fact(page, "step")) == ("running", "1,234")
    assert page.locator("#ranks .rank").count() == 4
    assert page.locator("#timeline rect.run").count() == 1
    page.wait_for_selector("#failures >> text=None.")
    assert "train.py" in page.locator("#story pre").inner_text()
    assert page.title() == "train.py - regrow"


def test_the_last_exchange_of_heartbeats_of_a_rank_is_shown(
    open_page: Any, web: Served, job: WrittenJob
) -> None:
    job.step(0, 3)
    job.heartbeat(0, ago=12)
    page = the_job(open_page(web.url))
    page.wait_for_selector("#ranks .rank[title*='last exchange of heartbeats 1']")
    assert page.locator("#ranks .rank[title*='heartbeat']").count() == 1


def test_the_default_id_of_a_job_is_not_shown_and_restarts_that_are_not_charged_are(
    open_page: Any, tmp_path: Path
) -> None:
    job = WrittenJob(tmp_path, run_id=NO_ID)
    job.start()
    job.emit("round.ended", node="n2", why="host b waits to join", failed=False)
    job.end("STOPPED")
    job.emit("job.restarting", restart_count=1, restarts_left=3, delay_s=0, reason="membership")
    job.start()
    with served(tmp_path) as web:
        page = the_job(open_page(web.url))
        assert page.locator("#overview h1").inner_text().strip() == "train.py"
        assert fact(page, "restarts") == "1 (0 charged, 3 left)"
    job.close()


def test_the_ranks_that_are_not_shown_are_counted(
    open_page: Any, web: Served, job: WrittenJob
) -> None:
    job.start(world_size=6)
    page = the_job(open_page(web.url))
    page.wait_for_selector("#ranks >> text=Without 2 ranks of other hosts: start regrow web with")
    job.start(world_size=4)
    page.wait_for_selector("#ranks >> text=of other hosts", state="hidden")


def test_a_step_is_shown_within_a_second(open_page: Any, web: Served, job: WrittenJob) -> None:
    page = the_job(open_page(web.url))
    for step in range(1, 6):
        assert_step_shown_in_time(page, job, 2, step)


def test_a_job_without_recent_steps_does_not_look_healthy(
    open_page: Any, tmp_path: Path, job: WrittenJob
) -> None:
    job.begun -= 120
    for rank in range(4):
        job.step(rank, 3)
    with served(tmp_path) as web:
        page = the_job(open_page(web.url))
        page.wait_for_selector("#ranks .rank.b0")
        assert "last step" not in page.locator("#overview").inner_text()
        for rank in range(4):
            job.step(rank, 1001, ago=60 + rank)
        page.wait_for_selector("#ranks .rank.stale")
        assert page.locator("#ranks .rank.stale").count() == 4
        assert fact(page, "steps/s (slowest rank)") == "0"
        assert re.fullmatch(r"1:\d\d min ago", fact(page, "last step"))
        about = page.locator("#ranks p").inner_text()
        assert about.startswith("no recent step: rank 3 (1:")
        title = page.locator("#ranks .rank[data-rank='2']").get_attribute("title")
        assert "running, step 1,001, no recent step, last step 1:" in title
        for rank in range(4):
            job.step(rank, 1002, first=1002)
        page.wait_for_selector("#ranks .rank.stale", state="detached")
        assert "last step" not in page.locator("#overview").inner_text()


def test_a_page_follows_a_restart(open_page: Any, web: Served, job: WrittenJob) -> None:
    job.log(1, "before\n")
    page = the_job(open_page(web.url))
    page.click("#ranks .rank[data-rank='1']")
    page.wait_for_selector("#logs pre >> text=before")
    job.fail(1, "RuntimeError: loss is NaN")
    page.wait_for_selector("#ranks .rank.sick[data-rank='1']")
    page.wait_for_selector("#failures >> text=RuntimeError: loss is NaN >> nth=0")
    job.start()
    job.log(1, "after\n")
    job.step(1, 3, first=3)  # a first step never gets old
    page.wait_for_selector("#ranks .rank.b0[data-rank='1']")
    page.wait_for_selector("#logs pre >> text=after")
    assert "before" not in page.locator("#logs pre").inner_text()
    assert fact(page, "attempt") == "1"
    assert "is running with 1 restart" in page.locator("#story pre").inner_text()
    page.wait_for_selector("#timeline rect.end-bad")
    page.wait_for_selector("#timeline line.mark", state="attached")  # a line has no area


def test_a_rank_without_output_here_shows_no_log_of_another_rank(
    open_page: Any, web: Served, job: WrittenJob
) -> None:
    job.log(1, "of rank 1\n")
    page = the_job(open_page(web.url))
    page.wait_for_selector("#logs pre >> text=of rank 1")  # the lowest rank with output
    page.click("#ranks .rank[data-rank='3']")
    page.wait_for_selector("#logs p >> text=No output of rank 3 here")
    assert page.locator("#logs pre").text_content() == ""
    assert page.locator("#logs select").input_value() == ""
    page.click("#ranks .rank[data-rank='1']")
    page.wait_for_selector("#logs pre >> text=of rank 1")
    assert page.locator("#logs p").is_hidden()
    # A rank that gets output here in the next attempt is shown then.
    page.click("#ranks .rank[data-rank='3']")
    job.end("FAILED")
    job.attempt += 1
    job.log(3, "of rank 3\n")
    job.attempt -= 1
    job.start()
    page.wait_for_selector("#logs pre >> text=of rank 3")


@pytest.mark.parametrize("how", ["click", "Enter", "Escape"])
def test_a_selected_rank_can_be_unselected(
    open_page: Any, web: Served, job: WrittenJob, how: str
) -> None:
    for rank in range(4):
        job.step(rank, 9 * (rank > 0) + 1)
    page = the_job(open_page(web.url))
    page.wait_for_selector("#ranks p >> text=behind: rank 0 (9 steps)")
    page.click("#ranks .rank[data-rank='1']")
    page.wait_for_selector("#ranks p >> text=rank 1 on")
    if how == "click":
        page.click("#ranks .rank[data-rank='1']")
    else:
        page.keyboard.press(how)
    page.wait_for_selector("#ranks p >> text=behind: rank 0 (9 steps)")
    assert page.locator("#ranks .rank[aria-pressed='true']").count() == 0


def test_the_latest_incident_is_that_of_the_latest_time(open_page: Any, tmp_path: Path) -> None:
    first, second = (
        WrittenJob(tmp_path, [rank], host=host) for rank, host in enumerate(("one", "two"))
    )
    for node in (first, second):
        node.start(world_size=2)
    first.fail(0, "ValueError: OLD")
    with served(tmp_path) as web:
        page = the_job(open_page(web.url))
        page.wait_for_selector("#overview >> text=ValueError: OLD")
        second.fail(1, "ValueError: NEW")
        latest = page.wait_for_selector("#overview p:has-text('latest, '):has-text('NEW')")
        assert re.match(r"latest, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+: ", latest.inner_text())
        assert page.locator("#overview >> text=OLD").count() == 0


def test_all_times_of_the_page_are_in_the_time_zone_of_the_story(
    open_page: Any, tmp_path: Path, job: WrittenJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.fail(0, "ValueError: no")
    job.finish("FAILED", 1, "no")
    monkeypatch.setenv("TZ", "XYZ-09:13")  # 9 h 13 min east of UTC, like no zone of a browser
    with served(tmp_path) as web:
        page = open_page(web.url, timezone_id="America/New_York")
        page.wait_for_selector("#jobs tbody td")
        texts = page.locator("#jobs tbody td").all_inner_texts()
        the_job(page)
        page.wait_for_selector("#failures summary")
        for part in ("#overview p", "#failures summary", "#nodes tbody td:nth-child(7)"):
            texts.append(page.locator(part).first.inner_text())
        story = page.locator("#story pre").inner_text()
    stamps = [match for text in texts for match in re.findall(r"\d+:\d\d:\d\d.*?XYZ", text)]
    now = datetime.now(timezone(timedelta(hours=9, minutes=13)))
    near = {(now - timedelta(minutes=ago)).strftime("%H:%M") for ago in range(3)}
    assert len(stamps) == 5
    assert {stamp[:5] for stamp in stamps} <= near
    assert {stamp[:5] for stamp in re.findall(r"\d\d:\d\d:\d\d", story)} <= near


def test_a_failure_is_explained_with_its_timeline_and_cost(
    open_page: Any, web: Served, job: WrittenJob
) -> None:
    job.fail(1, "ValueError: one")
    job.emit("job.restarting", restart_count=1, restarts_left=2, delay_s=0, reason="failed")
    job.start()
    job.step(0, 5)
    page = the_job(open_page(web.url))
    page.wait_for_selector("#failures summary >> text=ValueError: one")
    shown = page.locator("#failures details")
    for part in ("Evidence", "What regrow did", "not rung 1", "Timeline", "Cost"):
        assert part in shown.inner_text()
    picture = shown.locator("img.timeline")
    assert "reaction" in picture.get_attribute("alt")
    assert "of all 4 workers together" in shown.inner_text()
    assert "from a failure or a hang until the agent acted on it" in shown.inner_text()
    page.wait_for_function("document.querySelector('#failures img').naturalWidth > 0")
    # What the reader closes stays closed when further events arrive, and a new failure is open.
    page.click("#failures summary")
    job.fail(0, "ValueError: two")
    page.wait_for_selector("#failures details[open] summary >> text=ValueError: two")
    assert page.locator("#failures details").count() == 2
    assert page.locator("#failures details[open]").count() == 1


ASKS_OFTEN = """async () => {
  const { accountPanel } = await import("/account.js");
  const found = { ledger: null, explanations: [], left_out: 0, is_current: false };
  let asked = 0;
  window.fetch = async () => (asked++, { ok: true, json: async () => found });
  const waits = [];
  window.setTimeout = (then) => waits.push(then);
  const panel = accountPanel("key");
  for (let events = 1; events <= 5; events++) {
    panel.update({ events });
    for (let turn = 0; turn < 100; turn++) await null;
  }
  return [asked, waits.length];
}"""


def test_an_account_that_is_not_current_is_read_again_once_after_a_pause(
    open_page: Any, web: Served
) -> None:
    assert open_page(web.url).evaluate(ASKS_OFTEN) == [1, 1]


def test_the_ledger_is_a_chart_with_all_buckets(open_page: Any, tmp_path: Path) -> None:
    # The script takes a while until its first step: else the agent may record the start of the
    # worker when the worker has already ended, and no startup is left.
    script = "import time, regrow\ntime.sleep(0.2)\nfor n in range(9): regrow.step(n)\n"
    job = Job(tmp_path, script, [], {})
    assert job.finish() == 0
    job.close()
    with served(job.log_dir) as web:
        page = the_job(open_page(web.url))
        page.wait_for_selector("#ledger table")
        text = page.locator("#ledger").inner_text()
        for part in (
            "goodput = productive",
            "effective training time",
            "unknown",
            "startup: script",
        ):
            assert part in text
        rows = page.locator("#ledger tbody tr").count()
        assert page.locator("#ledger svg rect").count() == rows
        shares = page.locator("#ledger tbody td:nth-child(3)").all_inner_texts()
        assert abs(sum(float(share.split()[0]) for share in shares) - 100) < 0.1 * rows


COLOURS = """async (buckets) => {
  const { accountPanel } = await import("/account.js");
  const ledger = { total_s: buckets.length, buckets };
  const found = { ledger, explanations: [], is_current: true };
  window.fetch = async () => ({ ok: true, json: async () => found });
  const panel = accountPanel("key");
  document.body.replaceChildren(panel.ledger);
  panel.update({ events: 1 });
  while (!document.querySelector("#ledger td")) await new Promise((done) => setTimeout(done, 5));
  const styles = (selector, property) =>
    [...document.querySelectorAll(selector)].map((each) => getComputedStyle(each)[property]);
  return [styles("#ledger .bucket", "fill"), styles("#ledger .key", "background")];
}"""


def test_each_bucket_of_the_ledger_has_a_colour_of_its_own(
    open_page: Any, web: Served, job: WrittenJob
) -> None:
    (ledger,) = build_ledgers({"": list(read_events(str(job.directory)))})
    seconds = dict.fromkeys((*MEANINGS, *(f"phase:{n}" for n in range(4))), 1.0)
    buckets = figures(replace(ledger, seconds=seconds))["buckets"]
    bars, keys = open_page(web.url).evaluate(COLOURS, buckets)
    assert len(set(bars)) == len(set(keys)) == len(seconds)
    assert sum("#hatch" in fill for fill in bars) == 1
    assert all("none" not in fill for fill in bars)


def test_512_ranks_are_shown_and_moved_through_with_the_keys(
    open_page: Any, tmp_path: Path
) -> None:
    job = WrittenJob(tmp_path / "runs", 512)
    job.start()
    for rank in range(512):
        step = 100 - (rank == 77) * 50
        job.step(rank, step, first=step)  # a first step never gets old
    with served(tmp_path / "runs") as web:
        page = the_job(open_page(web.url))
        page.wait_for_selector("#ranks .rank.b4")
        assert page.locator("#ranks .rank").count() == 512
        assert page.locator("#ranks .rank.b0").count() == 511
        assert "rank 77 (50 steps)" in page.locator("#ranks p").inner_text()
        page.focus("#ranks .rank[data-rank='0']")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Enter")
        page.wait_for_selector("#ranks .rank[data-rank='1'][aria-pressed='true']")
        assert "rank 1 on" in page.locator("#ranks p").inner_text()
        page.keyboard.press("End")
        page.keyboard.press("Space")
        page.wait_for_selector("#ranks .rank[data-rank='511'][aria-pressed='true']")
        for step in range(101, 106):
            assert_step_shown_in_time(page, job, 300, step)
    job.close()


def contrast(page: Any, selector: str) -> float:
    """Return the contrast of an element's text and background, as WCAG 2 defines it."""
    page.wait_for_selector(selector)
    # In one piece: the page may replace the element at any time.
    code = """selector => {
        const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((value) => {
            const part = value / 255;
            return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        });
        const light = ([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b;
        const backOf = (each) => getComputedStyle(each).backgroundColor;
        const element = document.querySelector(selector);
        let back = element;
        while (backOf(back) === "rgba(0, 0, 0, 0)") back = back.parentElement;
        const [one, two] = [getComputedStyle(element).color, backOf(back)]
            .map((text) => light(rgb(text)) + 0.05);
        return Math.max(one, two) / Math.min(one, two);
    }"""
    found: float = page.evaluate(code, selector)
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_readable_in_both_schemes(
    open_page: Any, web: Served, job: WrittenJob, scheme: str
) -> None:
    job.fail(0, "ValueError: no")
    job.start()
    job.begun -= 120
    for rank, step in enumerate((100, 95, 9)):
        job.step(rank, step, first=step)  # a first step never gets old
    page = the_job(open_page(web.url, color_scheme=scheme))
    page.wait_for_selector("#ranks .rank.b4")
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", back)[0]) < 128) == (scheme == "dark")
    selectors = ("h1", ".dim", ".state", "#failures summary", "#story pre", "#nodes th", "#home")
    for selector in (*selectors, ".rank.b0", ".rank.b2", ".rank.b4", ".rank.none"):
        assert contrast(page, selector) >= 4.5, selector
    job.step(3, 9, ago=60)
    assert contrast(page, ".rank.stale") >= 4.5


def test_everything_is_reached_with_the_tab_key(
    open_page: Any, web: Served, job: WrittenJob
) -> None:
    job.log(0, "x\n")
    job.fail(0, "ValueError: no")
    job.start()
    page = open_page(web.url)
    page.wait_for_selector("#jobs a")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#logs select:visible")
    page.wait_for_selector("#failures summary")
    reached = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        element = "document.activeElement"
        reached.add(page.evaluate(f"{element}.closest('section')?.id + ' ' + {element}.tagName"))
    assert reached >= {
        *("ranks BUTTON", "failures SUMMARY", "logs SELECT", "logs INPUT", "logs PRE", "story PRE"),
    }


def test_without_the_token_the_page_asks_for_it(open_page: Any, browser: Any, web: Served) -> None:
    context = browser.new_context()
    page = context.new_page()  # its console shows the refused requests
    page.goto(web.url.partition("#")[0] + "#token=wrong")
    page.fill("#token", web.token)
    page.click("text=Open >> nth=-1")
    page.wait_for_selector("#jobs a")
    context.close()


def test_a_text_of_a_job_is_never_read_as_html(
    open_page: Any, web: Served, job: WrittenJob
) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    job.log(0, evil + "\n")
    job.fail(0, evil)
    page = the_job(open_page(web.url))
    page.wait_for_selector("#logs pre >> text=onerror")
    page.wait_for_selector("#failures >> text=onerror >> nth=0")
    assert page.locator("img:not(.timeline), script:not([src])").count() == 0
    page.wait_for_function("document.querySelector('img.timeline').naturalWidth > 0")


def test_a_finished_real_job_is_shown_from_its_log(open_page: Any, tmp_path: Path) -> None:
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--redirects", "3"]
    job = Job(tmp_path, FAILS_ONCE, flags, {})
    assert job.finish() == 0, job.output
    job.close()
    with served(job.log_dir) as web:
        page = the_job(open_page(web.url))
        page.wait_for_selector("#logs pre >> text=rank 0 attempt 1 step 30")
        assert (fact(page, "state"), fact(page, "step")) == ("succeeded", "30")
        assert (fact(page, "attempt"), fact(page, "restarts")) == ("1", "1 (0 left)")
        assert page.locator("#ranks .rank.off").count() == 2
        page.wait_for_selector("#failures summary >> text=ValueError: no more")
        page.wait_for_selector("#ledger td >> text=productive")
        assert page.locator("#timeline rect.end-bad").count() == 1
        page.click("#ranks .rank[data-rank='1']")
        page.wait_for_selector("#ranks p >> text=rank 1 on")
        assert "succeeded, step 30" in page.locator("#ranks p").inner_text()
        page.wait_for_selector("#logs pre >> text=rank 1 attempt 1 step 30")
        assert "SUCCEEDED after" in page.locator("#story pre").inner_text()


def test_a_real_job_whose_agent_was_killed_is_shown_from_its_log(
    open_page: Any, tmp_path: Path
) -> None:
    job = Job(tmp_path, TRAIN, ["--nproc-per-node", "2", "--redirects", "3"], {})
    try:
        job.await_event("worker.first_step")
        wait_until(lambda: len(job.events("worker.first_step")) == 2, "both ranks make steps")
        outputs = [*job.log_dir.glob("*/attempt_0/*/stdout.log")]
        wait_until(lambda: all(output.stat().st_size for output in outputs), "both ranks print")
        job.signal(signal.SIGKILL)
        job.process.wait()
        assert job.left_behind() == []  # the guardian has killed the workers
        with served(job.log_dir) as web:
            page = open_page(web.url)
            page.wait_for_selector("#jobs td >> text=killed")
            the_job(page)
            page.wait_for_selector("#logs pre >> text=rank 0 attempt 0 step")
            assert (fact(page, "state"), fact(page, "step")) == ("killed", "at least 1")
            assert page.locator("#ranks .rank.off").count() == 2
            page.click("#ranks .rank[data-rank='1']")
            page.wait_for_selector("#ranks p >> text=unknown, step at least 1")
            page.wait_for_selector("#logs pre >> text=rank 1 attempt 0 step")
            page.wait_for_selector("#ledger table")
            assert "UNFINISHED" in page.locator("#story pre").inner_text()
    finally:
        job.close()


def test_the_logs_of_a_finished_and_of_a_killed_job(open_page: Any, tmp_path: Path) -> None:
    finished = WrittenJob(tmp_path, run_id="finished")
    finished.start()
    finished.step(0, 9)
    finished.log(0, "bye\n")
    finished.end("SUCCEEDED")
    finished.finish("SUCCEEDED")
    killed = WrittenJob(tmp_path, run_id="killed", pid=2**22 - 1)
    killed.start()
    killed.close()
    with served(tmp_path) as web:
        page = open_page(web.url)
        page.click("text=finished")
        page.wait_for_selector("#logs pre >> text=bye")
        assert (fact(page, "state"), fact(page, "step")) == ("succeeded", "9")
        assert page.locator("#ranks .rank.off").count() == 2
        page.click("#home")
        page.click("#jobs a >> text=killed")
        page.wait_for_selector("#overview >> text=killed >> nth=0")
        assert fact(page, "state") == "killed"


def test_a_page_connects_again_to_a_server_that_comes_back(
    browser: Any, tmp_path: Path, job: WrittenJob
) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-enough-bytes")
    token.chmod(0o600)
    context = browser.new_context()
    page = context.new_page()  # its console shows the lost connection
    with served(tmp_path, "--token-file", str(token)) as web:
        page.goto(web.url)
        the_job(page)
        port = web.port
    page.wait_for_selector("#link.lost")
    with served(tmp_path, "--token-file", str(token), "--port", str(port)):
        job.step(0, 77)
        page.wait_for_selector("#overview dd >> text=77")
    context.close()


def test_a_real_job_is_followed_through_a_kill_of_a_worker(open_page: Any, tmp_path: Path) -> None:
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--redirects", "3"]
    job = Job(tmp_path, TRAIN, flags, {})
    try:
        started = job.await_event("attempt.started")
        with served(job.log_dir) as web:
            page = the_job(open_page(web.url))
            page.wait_for_selector("#ranks .rank:not(.none)")
            page.wait_for_selector("#logs pre >> text=rank 0 attempt 0 step")
            os.kill(started["pids"]["1"], signal.SIGKILL)
            page.wait_for_selector("#failures >> text=SIGKILL >> nth=0")
            page.wait_for_selector("#logs pre >> text=rank 0 attempt 1 step")
            assert fact(page, "attempt") == "1"
            job.signal(signal.SIGTERM)
            page.wait_for_selector("#overview >> text=signaled >> nth=0")
        job.finish()
    finally:
        job.close()


@pytest.mark.parametrize("stopped", ["browser", "web"])
def test_a_job_goes_on_while_its_view_is_stopped(
    open_page: Any, tmp_path: Path, stopped: str
) -> None:
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--redirects", "3"]
    job = Job(tmp_path, TRAIN, flags, {})
    try:
        started = job.await_event("attempt.started")
        with served(job.log_dir) as web:
            page = the_job(open_page(web.url))
            page.wait_for_selector("#ranks .rank:not(.none)")
            views = browser_processes() if stopped == "browser" else [web.process.pid]
            assert views
            for pid in views:
                os.kill(pid, signal.SIGSTOP)
            try:
                os.kill(started["pids"]["1"], signal.SIGKILL)
                job.await_event("attempt.started", lambda event: event["attempt"] == 1)
                job.await_event("worker.first_step", lambda event: event["attempt"] == 1)
            finally:
                for pid in views:
                    os.kill(pid, signal.SIGCONT)
            page.wait_for_selector("#failures >> text=SIGKILL >> nth=0")
            page.wait_for_selector("#logs pre >> text=rank 0 attempt 1 step")
            assert fact(page, "attempt") == "1"
            job.signal(signal.SIGTERM)
            page.wait_for_selector("#overview >> text=signaled >> nth=0")
        job.finish()
    finally:
        job.close()
