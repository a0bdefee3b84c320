"""Measure the cost of storing a worker's output: pump and relay beside `cat > file`, on equal work.

    python benchmarks/logs.py [--megabytes 1024] [--runs 3] [--directory DIR] [--check]

A producer writes lines to a pipe as fast as it can, in blocks of 64 KiB. Four consumers store them
in turn, in a file of the same file system: the pump, the pump with a tee to a console that accepts
everything, the relay of a stderr that is not redirected, and `cat`. Two medians are printed: MB/s
from the producer's start until all is stored, and seconds of processor time (user and system) of
the consumer per GB. With `--check`, each must be within `MOST_CPU` of the processor time of `cat`.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from regrow.workers.logs.follower import Follower
from regrow.workers.logs.lines import Sink
from regrow.workers.logs.pump import LogPump
from regrow.workers.logs.relay import StderrRelay
from regrow.workers.logs.specs import LogsDest

MOST_CPU = {"pump": 1.5, "pump, tee": 4.0, "relay": 3.0}
"""Bounds for --check: processor time of each, as a multiple of that of `cat`."""
PRODUCER = """
import os, sys
line = b"step 12345 loss 0.123456 lr 0.0001 tokens/s 123456.7 grad 1.234567 eta 01:23\\n"
block = (line * (65536 // len(line) + 1))[:65536]
for _ in range(int(sys.argv[1]) * 16):
    os.write(1, block)
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of one run."""

    seconds: float
    """Seconds from the producer's start until all is stored (and shown, with tee)."""
    cpu: float
    """Seconds of processor time of the consumer."""


def _producer(megabytes: int, stdout: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PRODUCER, str(megabytes)], stdout=stdout)


def with_cat(path: str, megabytes: int) -> Measured:
    """Measure `producer | cat > path`."""
    started = time.monotonic()
    read, write = os.pipe()
    with open(path, "wb") as file:
        cat = subprocess.Popen(["cat"], stdin=read, stdout=file)
    producer = _producer(megabytes, write)
    os.close(read)
    os.close(write)
    producer.wait()
    _, _, usage = os.wait4(cat.pid, 0)
    cat.returncode = 0
    return Measured(time.monotonic() - started, usage.ru_utime + usage.ru_stime)


def with_pump(path: str, megabytes: int, *, tee: bool) -> Measured:
    """Measure the producer's stdout through a pump, and shown on /dev/null with `tee`."""
    console = os.open(os.devnull, os.O_WRONLY)
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.monotonic()
    dest = LogsDest({0: path}, {0: ""}, {0: path} if tee else {})
    pump = LogPump("worker", dest, follower=Follower(Sink(2), {"stdout": Sink(console)}))
    pump.start()
    producer = _producer(megabytes, pump.writer_fds(0)[1])
    pump.close_writers()
    producer.wait()
    pump.stop(60)
    seconds = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    os.close(console)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measured(seconds, cpu)


def with_relay(path: str, megabytes: int) -> Measured:
    """Measure the producer through a relay whose stderr is `path`."""
    with open(path, "wb") as file:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.monotonic()
        relay = StderrRelay(file.fileno())
        relay.open()
        stream = relay.add()
        assert stream is not None
        relay.start()
        producer = _producer(megabytes, stream.writer)
        os.close(stream.writer)
        _, _, own = os.wait4(producer.pid, 0)
        producer.returncode = 0
        relay.close()
        seconds = time.monotonic() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measured(seconds, cpu - own.ru_utime - own.ru_stime)


def main() -> None:
    """Measure all consumers and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024, help="output per run")
    parser.add_argument("--runs", type=int, default=3, help="runs of each, alternating")
    parser.add_argument("--directory", default=None, help="where the files go")
    parser.add_argument("--check", action="store_true", help="fail if a bound is exceeded")
    args = parser.parse_args()
    ways: dict[str, Callable[[str, int], Measured]] = {
        "cat > file": with_cat,
        "pump": lambda path, size: with_pump(path, size, tee=False),
        "pump, tee": lambda path, size: with_pump(path, size, tee=True),
        "relay": with_relay,
    }
    results: dict[str, list[Measured]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        path = os.path.join(directory, "stdout.log")
        for _ in range(args.runs):
            for name, way in ways.items():
                results[name].append(way(path, args.megabytes))
                stored = os.stat(path).st_size  # noqa: PTH116
                assert stored == args.megabytes << 20, f"{name} stored {stored} bytes"
                os.unlink(path)
    base = statistics.median(run.cpu for run in results["cat > file"])
    print(
        f"{args.megabytes} MB of lines, {args.runs} runs each, in {args.directory or 'the tmp dir'}"
    )
    for name, runs in results.items():
        seconds = statistics.median(run.seconds for run in runs)
        cpu = statistics.median(run.cpu for run in runs)
        per_gb = cpu * 1024 / args.megabytes
        print(
            f"{name:12} {args.megabytes / seconds:7.0f} MB/s   cpu {per_gb:5.2f} s/GB"
            f"   {cpu / base:5.2f} x cat"
        )
        if args.check and cpu > base * MOST_CPU.get(name, 1.0):
            raise SystemExit(f"{name}: more than {MOST_CPU[name]} x the processor time of cat")


if __name__ == "__main__":
    main()
