"""Make the pictures of `docs/guides/watching.md`: `make screenshots`."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from helpers.commands import ROOT
from helpers.views.served import served
from helpers.views.written_job import WrittenJob

RANKS = 64


def write(runs: Path) -> WrittenJob:
    """Write a job with two failures, in its third attempt."""
    job = WrittenJob(runs, RANKS, run_id="llama-8b", host=None)
    step = 0
    for failure in ("torch.OutOfMemoryError: CUDA out of memory", "RuntimeError: loss is NaN", ""):
        job.start()
        job.begun -= 90
        first, step = step - 40 if step else 0, step + 400
        job.emit(
            "worker.first_step", rank=0, local_rank=0, step=first + 1, step_monotonic=job.begun
        )
        for rank in range(RANKS):
            lag = {11: 6, 12: 2, 37: 23, 50: 60}.get(rank, rank % 2)
            job.step(rank, step - lag, first=first + 1)
        job.log(
            11, "".join(f"step {n}  loss {2.2 / (n / 100):.4f}\n" for n in range(step - 60, step))
        )
        time.sleep(2)
        if failure:
            job.fail(11, failure)
            job.emit("job.restarting", restart_count=1, restarts_left=2, delay_s=0, reason=failure)
            time.sleep(0.4)
    job.emit("worker.suspended", rank=20, local_rank=20, pid=1020, signal="SIGSTOP")
    return job


def main() -> None:
    """Write the pictures."""
    program = shutil.which("chromium")
    if program is None:
        sys.exit("chromium is missing: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        job = write(Path(folder) / "runs")
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        with served(Path(folder) / "runs") as web:
            for scheme in ("light", "dark"):
                page = browser.new_page(
                    color_scheme="dark" if scheme == "dark" else "light",
                    viewport={"width": 1100, "height": 1250},
                )
                page.goto(web.url)
                page.click("#jobs a")
                page.click("#ranks .rank[data-rank='11']")
                page.wait_for_selector("#logs pre >> text=loss")
                page.screenshot(path=ROOT / "docs" / "images" / f"web-{scheme}.png")
        job.close()


if __name__ == "__main__":
    main()
