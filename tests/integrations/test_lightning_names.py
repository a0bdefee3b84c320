"""`RegrowCallback` is a callback of the Lightning that the script uses, under either of its names.

The packages are stand-ins: their trainers accept instances of their own `Callback` only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NEW, OLD = "lightning.pytorch", "pytorch_lightning"


@pytest.mark.parametrize(
    ("installed", "imported", "used"),
    [
        ([NEW], [], NEW),
        ([OLD], [], OLD),
        ([OLD], [OLD], OLD),
        ([NEW, OLD], [], NEW),
        ([NEW, OLD], [OLD], OLD),
        ([NEW, OLD], [NEW], NEW),
        ([NEW, OLD], [OLD, NEW], NEW),
    ],
)
def test_the_callback_is_one_of_the_lightning_that_the_script_uses(
    installed: list[str], imported: list[str], used: str, tmp_path: Path
) -> None:
    for name in installed:
        package = tmp_path / name.replace(".", "/")
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("class Callback: pass\n")
        (tmp_path / name.partition(".")[0] / "__init__.py").touch()
    lines = [f"import {name}" for name in imported]
    if NEW not in installed:  # also where the real package is
        lines += ["import sys", "sys.modules['lightning'] = None"]
    lines += ["from regrow.integrations.lightning import RegrowCallback"]
    lines += ["print(RegrowCallback.__base__.__module__)"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [used], done.stderr
