"""Measure what `regrow.State` costs in each step, and how fast a rank receives a state.

    python benchmarks/state.py [--check] [--mb 1024] [--runs 5]

Two ranks run under `regrow run` on this host.

**Commit.** Rank 0 runs empty commits in blocks, and the same commits with `prepare` for
`regrow.rng()`. The figures are those of the fastest block, per commit, because other load on the
machine only adds to them. Beside them is one step of AdamW for a model of two layers (1.05 million
parameters) on one thread, measured in the same way.

**Recovery.** Rank 1 makes its state dirty, and receives a tensor from rank 0 over loopback. The
time runs from the start to the end of `recover` on rank 1, with checksums on both sides. Each run
measures again, and the figure is the median. Beside it are the same bytes through a bare TCP socket
over loopback: the difference is what checksums and copies take.

`--check` compares with the bound of a commit and exits with 1 if it is missed.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

COMMIT_BOUND_US = 20.0
BLOCKS, COMMITS = 30, 500
LIMIT_S = 300.0


def worker(mb: int, runs: int, path: str) -> None:
    """Measure in a rank of the job; rank 0 writes the figures of both ranks to a file."""
    import os

    import torch

    import regrow
    from regrow.inprocess import CallWrapper, Wrapper

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512))
    optim = torch.optim.AdamW(model.parameters())
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    tensor = torch.full((mb << 18,), float(os.environ["RANK"]))
    plain = regrow.State({"model": model, "optim": optim})
    drawing = regrow.State({"model": model}, {"rng": regrow.rng()})
    large = regrow.State({"tensor": tensor})

    def fastest_us(run: Callable[[int], object], blocks: int, count: int) -> float:
        times, step = [], 0
        for _ in range(blocks):
            begun = time.perf_counter()
            for _ in range(count):
                step += 1
                run(step)
            times.append((time.perf_counter() - begun) / count * 1e6)
        return min(times)

    def commit(state: regrow.State) -> Callable[[int], object]:
        def run(step: int) -> None:
            with state.commit(step):
                pass

        return run

    @Wrapper()
    def measure(call: CallWrapper) -> None:
        figures: dict[str, Any] = {}
        for state in (plain, drawing):
            state.recover(call, lambda: 0)
        if os.environ["RANK"] == "0":
            figures["commit_us"] = fastest_us(commit(plain), BLOCKS, COMMITS)
            figures["commit_with_rng_us"] = fastest_us(commit(drawing), BLOCKS, COMMITS)
            figures["optimizer_us"] = fastest_us(lambda _: optim.step(), 5, 20)
        large.recover(call, lambda: 0)
        seconds = []
        for step in range(1, runs + 1):
            with suppress(ZeroDivisionError), large.commit(step):
                if os.environ["RANK"] == "1":
                    tensor.fill_(-1)
                    raise ZeroDivisionError
            begun = time.perf_counter()
            large.recover(call, lambda: 0)
            seconds.append(time.perf_counter() - begun)
            assert float(tensor[-1]) == 0.0
        if os.environ["RANK"] == "1":
            call.state.store.set("seconds", json.dumps(seconds))
        else:
            call.state.store.wait(["seconds"])
            figures["seconds"] = json.loads(call.state.store.get("seconds"))
            Path(path).write_text(json.dumps(figures))

    measure()  # type: ignore[call-arg]


def bare_s(mb: int) -> float:
    """Return the seconds that a TCP connection over loopback takes for so many MiB."""
    chunk = 4 << 20
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as source,
        listener.accept()[0] as target,
    ):

        def send() -> None:
            data = bytes(chunk)
            for start in range(0, mb << 20, len(data)):
                source.sendall(memoryview(data)[: (mb << 20) - start])

        sender = threading.Thread(target=send)
        into = bytearray(chunk)
        begun = time.perf_counter()
        sender.start()
        left = mb << 20
        while left:
            received = target.recv_into(into)
            assert received, "the sender has ended"
            left -= received
        seconds = time.perf_counter() - begun
        sender.join()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--mb", type=int, default=1024, help="size of the state in MiB")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.mb, options.runs, options.worker)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figures")
        launch = ["-m", "regrow.run", "--standalone", "--nproc-per-node=2", "--log-dir", folder]
        sizes = [f"--mb={options.mb}", f"--runs={options.runs}"]
        subprocess.run(
            [sys.executable, *launch, __file__, *sizes, f"--worker={path}"],
            check=True,
            timeout=LIMIT_S,
        )
        figures = json.loads(path.read_text())
    print(f"commit, empty                        {figures['commit_us']:8.1f} us")
    print(f"commit with prepare of regrow.rng()  {figures['commit_with_rng_us']:8.1f} us")
    print(f"one step of AdamW, 1.05 M parameters {figures['optimizer_us']:8.1f} us")
    median = statistics.median(figures["seconds"])
    rate = options.mb / 1024 * 1.073741824 / median
    print(f"recover of {options.mb} MiB over loopback   {median:8.2f} s   {rate:.2f} GB/s")
    bare = statistics.median(bare_s(options.mb) for _ in range(options.runs))
    print(f"the same bytes, a bare socket        {bare:8.2f} s   {rate * median / bare:.2f} GB/s")
    if options.check and figures["commit_us"] > COMMIT_BOUND_US:
        print(f"MISSED: a commit takes at most {COMMIT_BOUND_US:g} us")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
