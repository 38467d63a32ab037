"""Outputs that cannot take what a command says."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = "import sys; from jaxrl.cli.main import main; sys.exit(main(['--help']))"


def _run(shell: str) -> subprocess.CompletedProcess:
    command = f'{sys.executable} -c "{CODE}" {shell}'
    return subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)


def test_output_reader_that_leaves_early_is_no_error():
    result = _run("| head -1")

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: jaxrl")


@pytest.mark.parametrize(
    ("shell", "reason"), [("> /dev/full", "No space left on device"), (">&-", "it is closed")]
)
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1(shell, reason):
    result = _run(shell)

    assert result.returncode == 1
    assert result.stderr == f"jaxrl: error: cannot write to standard output: {reason}\n"


@pytest.mark.parametrize("shell", ["2> /dev/full", "2>&-"])
def test_error_that_cannot_be_told_keeps_its_exit_code(shell):
    code = CODE.replace("--help", "--nonsense")

    result = subprocess.run(["bash", "-c", f'{sys.executable} -c "{code}" {shell}'], check=False)

    assert result.returncode == 2
