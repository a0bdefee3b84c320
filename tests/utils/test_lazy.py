"""Packages that load their names at the first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import regrow.utils


def test_a_name_that_does_not_exist_is_an_attribute_error_of_the_package() -> None:
    with pytest.raises(AttributeError, match=r"module 'regrow.utils' has no attribute 'nothing'"):
        _ = regrow.utils.nothing


def test_dir_lists_names_that_are_not_loaded_yet() -> None:
    program = (
        "import sys, regrow.inprocess as package\n"
        "assert {'Wrapper', 'abort', '__name__'} <= set(dir(package))\n"
        "assert 'regrow.inprocess.abort' not in sys.modules\n"
        "assert package.abort is sys.modules['regrow.inprocess.abort']\n"
        "assert package.State is sys.modules['regrow.inprocess.state'].State\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
