"""The examples of the page on serving run against a real server."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from serving.servers import serving

from jaxrl.cli.served import TOP_LOGPROBS
from jaxrl.serving import http_server, openai_requests
from jaxrl.serving.errors import STATUSES

TOKEN = "a-token-for-examples"


@pytest.fixture
def page(repo_root):
    return (repo_root / "docs" / "serving.md").read_text(encoding="utf-8")


@pytest.fixture
def server(tiny):
    with tiny.driver() as driver, serving(driver, template=tiny.chat, token=TOKEN) as server:
        yield server


def example(page, language, server):
    """The example in a language, asked of this server."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return block.replace("http://127.0.0.1:8000", server.url)


def test_python_example_runs(page, server):
    pytest.importorskip("openai", reason="needs the openai client")
    space = {}

    exec(example(page, "python", server).replace('"TOKEN"', repr(TOKEN)), space)

    assert space["answer"].usage.completion_tokens >= 1
    assert space["weights"]["last"]["number"] == 0
    assert space["version"].startswith("v0:")


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_curl_examples_run(page, server):
    commands = example(page, "bash", server).replace("curl ", "curl --fail --silent --show-error ")

    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        env={"TOKEN": TOKEN, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert '"object":"chat.completion"' in done.stdout
    assert "data: [DONE]" in done.stdout
    assert '"object":"list"' in done.stdout


def test_page_names_every_code_and_limit(page):
    for status in STATUSES.values():
        assert f"| {status.http} |" in page
        assert f"`{status.code}`" in page
    for field in openai_requests.IGNORED:
        assert f"`{field}`" in page
    assert f"a number up to {TOP_LOGPROBS}" in page
    assert f"beyond {http_server.MAX_BODY >> 20} MiB" in page
    assert f"within {http_server.BODY_S:.0f} s" in page
