"""The example of the page on gRPC runs as it is written, but for the port."""

from __future__ import annotations

import asyncio
import re

import pytest
from serving.grpc_setup import serving


@pytest.mark.asyncio
async def test_example_of_the_page_runs(tiny, repo_root):
    page = (repo_root / "docs" / "serving-grpc.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    space, servers = {}, []

    with tiny.driver() as driver:
        async with serving(driver, token="TOKEN", stop_ids=(), servers=servers):
            here = block.replace("127.0.0.1:9000", f"127.0.0.1:{servers[0].port}")
            await asyncio.to_thread(exec, here, space)

    assert len(space["text"]) > 0
    assert (space["weights"].number, space["weights"].digest) == (0, driver.version.digest)
    assert space["response"].usage.completion_tokens == 16
