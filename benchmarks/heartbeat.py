"""How soon all workers know of a lost one, what a beat costs, and what it costs a training.

    python benchmarks/heartbeat.py [--check] [--sizes 2,8,32,128,512] [--both 2,8,32] [--runs 3]
    python benchmarks/heartbeat.py --quiet MINUTES

**Loss.** Workers beat with a period of 1 s and a time-out of 2 s. One is lost, and the time is that
until the last of the others knows. Ours are light clients (see `_beaters.py`): real connections and
the real rules, many to a process, one server. In turn with them, as far as `--both` says, DTensor's
algorithm over gloo, a process for each rank (see `_gloo_beat.py`). It has two times: until the
first failed exchange, which ends it because of a mistake in it, and until the third, which it means
to be the one. "Killed" is a process that ends, at a quarter, a half and three quarters of a period
after a beat in turn; "silent" is one that is there and does nothing. That is known by waiting, and
ours waits for as long as it says: 3 x (1 + 2) s after the last beat.

**Faults**: what is done to one of a few real worker processes, and when the last of all has ended
(see `_beat_faults.py`).

**Cost**, at a period of 0.2 s: messages and bytes of a worker and beat, both ways together, the
processor time of a real worker's process for a beat, and that of the server, for the beat of all
and for each worker.

**Training.** The digits example on two workers (`_beat_training.py`), blocks of steps in turn
without and with a heartbeat of 1 s. Told is the median ratio of the steps per second in a pair of
blocks, the interval in which the true median is with 95 %, and the noise: the median difference of
two blocks without that follow each other. The processor time of a step depends less on what else
the machine does, and is told as well.

**Quiet.** With `--quiet`, and nothing else then: 8 worker processes at a period of 1 s, each with a
main thread that computes without a pause, and a process for each core that does so, too. Not one
false alarm may be raised; exchanges that failed are counted.

`--check` compares with the bounds and exits with 1 where one is missed; so does an alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from _beat_faults import faults

from regrow.store import ServerProcess, make_token, start_server

SERVICES = {"heartbeat": "regrow.heartbeat._service:create"}
HERE = Path(__file__).parent
PROCESSES = 2
LIMIT_S = 300.0

PERIOD_S = 1.0
TIMEOUT_S = 2.0
BOUND_S = 3 * (PERIOD_S + TIMEOUT_S)
PHASES = (0.5, 0.25, 0.75)
COST_PERIOD_S = 0.2
HOLD_S = 6.0

KILLED_BOUND_S = 1.0
"""What `heartbeat.start` logs: one whose process ends is known within a second."""
LATE_S = 0.5
"""For the last of hundreds of simulated workers, on two cores, to hear what is known."""
MESSAGES = 2.0
MANY = 32
"""From so many workers on the bytes of a beat are compared, since up to eight ranks are named in
it, and the server's time, which for fewer workers is mostly that of waking up."""
BYTES_GROWTH_BOUND = 1.1  # of what a worker exchanges, from `MANY` to the most workers
WORKER_GROWTH_BOUND = 1.5  # of its processor time, from the fewest; the processor's speed varies
SERVER_GROWTH_BOUND = 1.5  # of the server's time for each worker, from `MANY` on
SLOWDOWN_BOUND = 0.01  # of a training, that is beyond doubt
QUIET_WORKERS = 8


# --- crowds of light clients


class Crowds:
    """Processes that hold the simulated workers of one job together."""

    def __init__(
        self, server: ServerProcess, token: bytes, size: int, simulated: int, period: float
    ) -> None:
        shares = [simulated // PROCESSES + (turn < simulated % PROCESSES) for turn in range(2)]
        firsts = [0, shares[0]]
        self._processes = [
            _python(
                "_beaters.py",
                server.endpoint,
                token.decode(),
                size,
                first,
                share,
                period,
                TIMEOUT_S,
            )
            for first, share in zip(firsts, shares, strict=True)
            if share
        ]
        self._answers()

    def order(self, words: str) -> list[Any]:
        """Give an order to all; return the answers."""
        self.begin(words)
        return self._answers()

    def begin(self, words: str) -> None:
        """Give an order to all."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(words + "\n")
            process.stdin.flush()

    def _answers(self) -> list[Any]:
        return [_line(process) for process in self._processes]

    answers = _answers

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.communicate()


def _python(file: str, *arguments: object, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HERE / file), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )


def _line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"benchmark: {process.args!r} ended with {process.wait()}")
    return json.loads(line)


@contextmanager
def job(size: int, simulated: int, period: float) -> Iterator[tuple[ServerProcess, bytes, Crowds]]:
    """A server, and a crowd of workers that are connected to it."""
    token = make_token()
    with start_server(token=token, services=SERVICES) as server:
        crowds = Crowds(server, token, size, simulated, period)
        yield server, token, crowds
        crowds.close()


# --- loss


def our_loss(size: int, how: str, phase: float) -> float:
    """Return the seconds from the loss of one of our workers to the last of the others knowing."""
    with job(size, size, PERIOD_S) as (_, _, crowds):
        crowds.order("form")
        answers = crowds.order(f"lose {how} {size // 2} {phase}")
    lost = next(at for at, _, _ in answers if at is not None)
    kinds = {kind for _, _, kinds in answers for kind in kinds}
    if kinds != {"lost" if how == "killed" else "missing"}:
        raise SystemExit(f"benchmark: a {how} worker was told to be {kinds}")
    seconds: float = max(knew for _, knew, _ in answers) - lost
    return seconds


def gloo_loss(size: int, how: str, phase: float) -> tuple[float, float]:
    """Return the seconds to the first and to the third failure of the last of the others."""
    process = _python("_gloo_beat.py", size, PERIOD_S, TIMEOUT_S, how, phase)
    out, _ = process.communicate(timeout=LIMIT_S)
    if process.returncode:
        raise SystemExit(f"benchmark: gloo with {size} ranks ended with {process.returncode}")
    found = json.loads(out)
    return found["first"] - found["lost"], found["third"] - found["lost"]


def losses(sizes: list[int], both: list[int], runs: int) -> list[str]:
    """Measure and print the first table; return what missed its bound."""
    print(
        f"seconds from the loss of a worker to the last of the others knowing; period "
        f"{PERIOD_S:g} s, time-out {TIMEOUT_S:g} s;\n"
        f"killed: median (most) of {runs} runs, silent: one\n"
    )
    heads = ("killed", "gloo, 1st failure", "3rd", "silent", "gloo, 1st", "3rd")
    print(f"{'workers':>8}" + "".join(f"{head:>19}" for head in heads))
    failures = []
    for size in sizes:
        ours: list[float] = []
        theirs: list[tuple[float, float]] = []
        for run in range(runs):
            phase = PHASES[run % len(PHASES)]
            ours.append(our_loss(size, "killed", phase))
            if size in both:
                theirs.append(gloo_loss(size, "killed", phase))
        silent = our_loss(size, "silent", PHASES[0])
        gloo_silent = [gloo_loss(size, "silent", PHASES[0])] if size in both else []
        cells = [_cell(ours), *_two(theirs), f"{silent:.2f}", *_two(gloo_silent)]
        print(f"{size:8}" + "".join(f"{cell:>19}" for cell in cells), flush=True)
        if max(ours) > KILLED_BOUND_S:
            failures.append(
                f"a killed one of {size} is known after {max(ours):.2f} s, not {KILLED_BOUND_S:g}"
            )
        if silent > BOUND_S + LATE_S:
            failures.append(
                f"a silent one of {size} is known after {silent:.2f} s, not {BOUND_S:g}"
            )
    return failures


def _cell(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({max(seconds):.2f})" if seconds else ""


def _two(found: list[tuple[float, float]]) -> list[str]:
    return [_cell([each[turn] for each in found]) for turn in range(2)]


# --- cost


def cost(size: int) -> tuple[float, float, float, float]:
    """Return messages and bytes of a worker and beat, and µs of a real worker and of the server."""
    with job(size, size - 1, COST_PERIOD_S) as (server, token, crowds):
        real = _python(
            "_beat_idly.py",
            *(server.endpoint, token.decode(), COST_PERIOD_S, TIMEOUT_S, HOLD_S),
            RANK=str(size - 1),
            WORLD_SIZE=str(size),
        )
        crowds.order("form")
        before = _processor_ns(server.pid)
        answers = crowds.order(f"hold {HOLD_S}")
        spent = _processor_ns(server.pid) - before
        found = _line(real)
        real.communicate()
    done = sum(beats for _, _, beats in answers)
    messages = sum(part * beats for part, _, beats in answers) / done
    volume = sum(part * beats for _, part, beats in answers) / done
    all_beats = done * size / (size - 1)  # with those of the real one
    return messages, volume, found["us_of_a_beat"], spent / 1000 / all_beats


def _processor_ns(pid: int) -> int:
    """Return the processor time of all threads of a process, in nanoseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def costs(sizes: list[int]) -> list[str]:
    """Measure and print the second table; return what missed its bound."""
    print(f"\na beat, at a period of {COST_PERIOD_S:g} s\n")
    heads = ("messages of a worker", "bytes", "µs of a worker", "µs of the server", "for each")
    print(f"{'workers':>8}" + "".join(f"{head:>22}" for head in heads))
    found = {}
    for size in sizes:
        found[size] = messages, volume, worker, server = cost(size)
        cells = (f"{messages:.2f}", f"{volume:.0f}", f"{worker:.0f}", f"{server * size:.0f}")
        print(
            f"{size:8}" + "".join(f"{cell:>22}" for cell in (*cells, f"{server:.1f}")), flush=True
        )
    failures = []
    least, most = min(sizes), max(sizes)
    for size, (messages, *_) in found.items():
        if abs(messages - MESSAGES) > 0.1:
            failures.append(f"{messages:.2f} messages of a worker and beat among {size}")
    bounds = [
        ("bytes of a worker", 1, min(most, MANY), BYTES_GROWTH_BOUND),
        ("processor time of a worker", 2, least, WORKER_GROWTH_BOUND),
        ("processor time of the server for each worker", 3, min(most, MANY), SERVER_GROWTH_BOUND),
    ]
    for what, column, first, bound in bounds:
        growth = found[most][column] / found[first][column] if first in found else 0.0
        if growth > bound:
            failures.append(f"{what} grows by {growth:.2f} from {first} to {most}, not {bound}")
    return failures


# --- training


def training(pairs: int, steps: int) -> list[str]:
    """Measure and print what a training loses; return what missed its bound."""
    token = make_token()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with start_server(token=token, services=SERVICES) as server:
        ranks = [
            _python(
                "_beat_training.py",
                *(server.endpoint, token.decode(), PERIOD_S, pairs, steps),
                RANK=str(rank),
                WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            for rank in range(2)
        ]
        blocks = _line(ranks[0])
        for rank in ranks:
            rank.communicate()
    ratios = [beating[0] / without[0] for without, beating in blocks]
    speeds = [without[0] for without, _ in blocks]
    noise = statistics.median(abs(later / earlier - 1) for earlier, later in pairwise(speeds))
    low, high = _interval(ratios)
    spent = [beating[1] / without[1] - 1 for without, beating in blocks]
    spent_low, spent_high = _interval(spent)
    print(
        f"\ndigits training on 2 workers, {pairs} pairs of blocks of {steps} steps, heartbeat "
        f"every {PERIOD_S:g} s:\n{statistics.median(speeds):.1f} steps/s without, "
        f"{statistics.median(beating[0] for _, beating in blocks):.1f} with; "
        f"slower by {1 - statistics.median(ratios):.2%} "
        f"({1 - high:.2%} to {1 - low:.2%}); two blocks without differ by {noise:.2%}\n"
        f"processor time of a step: more by {statistics.median(spent):.2%} "
        f"({spent_low:.2%} to {spent_high:.2%})"
    )
    if 1 - high > SLOWDOWN_BOUND:
        return [f"a training is slower by at least {1 - high:.2%}, not {SLOWDOWN_BOUND:.0%}"]
    return []


def _interval(values: list[float]) -> tuple[float, float]:
    """Return where the median of what these are a sample of is with 95 %, by resampling."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


# --- quiet


def quiet(minutes: float) -> list[str]:
    """Beat under full load; return what was wrong."""
    token = make_token()
    load = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        with start_server(token=token, services=SERVICES) as server:
            began = time.monotonic()
            workers = [
                _python(
                    "_beat_quietly.py",
                    *(server.endpoint, token.decode(), PERIOD_S, minutes * 60),
                    RANK=str(rank),
                    WORLD_SIZE=str(QUIET_WORKERS),
                )
                for rank in range(QUIET_WORKERS)
            ]
            said = [_line(worker) for worker in workers]
            for worker in workers:
                worker.communicate()
    finally:
        for process in load:
            process.kill()
            process.wait()
    failed = [line for each in said for line in each["failed"]]
    beats = min(each["beats"] for each in said)
    print(
        f"{QUIET_WORKERS} workers on {os.cpu_count()} cores under full load (load average "
        f"{os.getloadavg()[0]:.1f}), {time.monotonic() - began:.0f} s: {beats} beats, "
        f"{len(failed)} exchanges failed, {sum(each['alarm'] is not None for each in said)} alarms"
    )
    for line in failed:
        print(f"  {line}")
    wrong = [f"a false alarm: {each['alarm']}" for each in said if each["alarm"]]
    if not wrong and min(each["seconds"] for each in said) < 0.99 * minutes * 60:
        wrong.append("the heartbeat ended early")
    return wrong


# --- all together


def main() -> int:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="fail where a bound is missed")
    parser.add_argument("--sizes", type=_numbers, default=[2, 8, 32, 128, 512], help="workers")
    parser.add_argument("--both", type=_numbers, default=[2, 8, 32], help="workers beside gloo's")
    parser.add_argument("--runs", type=int, default=3, help="runs of killed workers")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks of the training")
    parser.add_argument("--steps", type=int, default=500, help="steps of such a block")
    parser.add_argument(
        "--only", choices=("loss", "faults", "cost", "training"), help="only this part"
    )
    parser.add_argument("--quiet", type=float, metavar="MINUTES", help="only this, for so long")
    options = parser.parse_args()
    if options.quiet:
        failures = quiet(options.quiet)
    else:
        parts: dict[str, Callable[[], list[str]]] = {
            "loss": lambda: losses(options.sizes, options.both, options.runs),
            "faults": lambda: faults(PERIOD_S, TIMEOUT_S),
            "cost": lambda: costs(options.sizes),
            "training": lambda: training(options.pairs, options.steps),
        }
        only = options.only
        failures = [each for name, part in parts.items() if only in (None, name) for each in part()]
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures and (options.check or options.quiet) else 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(main())
