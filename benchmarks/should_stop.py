"""Measure a call of `regrow.should_stop` while there is no request to stop.

    python benchmarks/should_stop.py [--check]

A worker of a real job calls it in a loop. `--check` exits with 1 if the median call takes more than
a microsecond.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

LONGEST_S = 1e-6
DEADLINE_S = 120.0
WORKER = """\
import statistics, timeit, regrow
regrow.should_stop()
runs = timeit.repeat("call()", globals={"call": regrow.should_stop}, number=100_000, repeat=15)
print("seconds", statistics.median(runs) / 100_000)
"""


def main() -> int:
    """Run the benchmark; return 1 if the bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if the bound is missed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_should_stop_") as folder:
        script = Path(folder, "worker.py")
        script.write_text(WORKER)
        command = [sys.executable, "-m", "regrow", "run", "--standalone", str(script)]
        job = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=True
        )
    seconds = float(job.stdout.split()[-1])
    print(f"regrow.should_stop: {seconds * 1e9:.0f} ns a call")
    return int(args.check and seconds > LONGEST_S)


if __name__ == "__main__":
    sys.exit(main())
