"""Make the pictures of `docs/guides/watching.md` from a real job: `make screenshots`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from helpers.commands import ROOT
from helpers.processes import wait_until
from helpers.views.served import served
from regrow.events import read_events

RANKS = 64
TRAIN = f"""
import os, time
from pathlib import Path

import regrow

STEP_S, CHECKPOINT_S, RANKS = 0.02, 0.3, {RANKS}
rank, attempt = int(os.environ["RANK"]), int(os.environ["REGROW_ATTEMPT"])
ready = Path(f"ready_{{attempt}}")
ready.mkdir(exist_ok=True)
(ready / str(rank)).touch()
while len(found := list(ready.iterdir())) < RANKS:
    time.sleep(0.01)
behind = {{11: 6, 12: 2, 37: 23, 50: 60}}.get(rank, rank % 2)
at = max(file.stat().st_mtime for file in found) + behind * STEP_S


def work(seconds):
    global at
    at += seconds
    time.sleep(max(at - time.time(), 0))


def train():
    for step in range(first, last + 1):
        work(STEP_S)
        regrow.step(step)
        print(f"step {{step}}  loss {{2.2 / (step / 100):.4f}}", flush=True)
        if step % 100 == 0:
            with regrow.phase("checkpoint"):
                work(CHECKPOINT_S)
    if rank == 11 and error is not None:
        raise error
    work(error is not None and 60)


out_of_memory = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
error = (out_of_memory, FloatingPointError("loss is NaN"), None)[attempt]
first, last = 400 * attempt + 1, (440, 840, 1600)[attempt]
train()
"""


def shown(page: Page, url: str) -> None:
    """Open the job, and select rank 11."""
    page.goto(url)
    page.click("#jobs a")
    page.click("#ranks .rank[data-rank='11']")
    page.wait_for_selector("#logs pre >> text=loss")
    page.wait_for_selector("#failures details >> nth=1")


def picture(page: Page, name: str) -> None:
    page.screenshot(path=ROOT / "docs" / "images" / name)


def main() -> None:
    """Write the pictures."""
    program = shutil.which("chromium")
    if program is None:
        sys.exit("chromium is missing: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        (Path(folder) / "train.py").write_text(TRAIN)
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        command = [sys.executable, "-m", "regrow", "run", "--standalone", "--log-dir", "runs"]
        command += ["--nproc-per-node", str(RANKS), "--max-restarts", "3", "--redirects", "3"]
        job = subprocess.Popen([*command, "train.py"], cwd=folder, stdin=subprocess.DEVNULL)
        try:
            pids = wait_until(lambda: third_attempt(Path(folder) / "runs"), "attempt 2", 120)
            with served(Path(folder) / "runs") as web:
                page = browser.new_page(
                    color_scheme="light", viewport={"width": 1100, "height": 1250}
                )
                shown(page, web.url)
                page.wait_for_selector("#overview dd >> text=1,2", timeout=120_000)
                os.kill(pids["20"], signal.SIGSTOP)
                page.wait_for_selector("#ranks .rank.sick[data-rank='20']")
                picture(page, "web-light.png")
                os.kill(pids["20"], signal.SIGCONT)
                job.wait(120)
                page = browser.new_page(
                    color_scheme="dark", viewport={"width": 1100, "height": 1150}
                )
                shown(page, web.url)
                page.wait_for_selector("#ledger table")
                page.evaluate("scrollTo(0, document.getElementById('logs').offsetTop - 60)")
                picture(page, "web-dark.png")
        finally:
            job.kill()
            job.wait()


def third_attempt(runs: Path) -> dict[str, int] | None:
    """Return the processes of the third attempt, by rank."""
    for log in runs.glob("*/events.jsonl"):
        for event in read_events(str(log.parent)):
            if event["name"] == "regrow.attempt.started" and event["attempt"] == 2:
                found: dict[str, int] = event["pids"]
                return found
    return None


if __name__ == "__main__":
    main()
