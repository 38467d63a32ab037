"""JetStream's own driver and orchestrator, as published, over our engine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("jetstream") is None,
        reason="needs google-jetstream, the extra `jetstream`",
    ),
]
PROGRAM = "tests/inference/jetstream_conformance.py"


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """What the program found, in a process that their driver may kill."""
    from conftest import ROOT

    path = tmp_path_factory.mktemp("jetstream") / "result.json"
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    done = subprocess.run(
        [sys.executable, PROGRAM, str(path)],
        cwd=ROOT,
        env={**os.environ, **cache, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("mode", ["interleaved", "disaggregated"])
def test_their_driver_gives_exactly_the_tokens_of_ours(result, mode):
    served = result[mode]

    for asked, tokens, expected in zip(
        served["asked"], served["tokens"], served["expected"], strict=True
    ):
        assert tokens == expected, f"prompt of {asked[0]} tokens, max_tokens={asked[1]}"


@pytest.mark.parametrize("mode", ["interleaved", "disaggregated"])
def test_the_requests_hold_the_cases_that_matter(result, mode):
    served = result[mode]

    given = list(zip(served["asked"], map(len, served["tokens"]), strict=True))

    assert len(given) > 3  # slots
    assert any(most == 1 and n == 1 for (_, most), n in given)
    assert any(most > 1 and n == 0 for (_, most), n in given), "an end as the first token"
    assert any(most == 1000 and n == 96 - min(64, length) for (length, most), n in given)
    assert {1, 7, 8, 9, 15, 16, 17, 63, 64, 80} <= {length for (length, _), _ in given}


@pytest.mark.parametrize("mode", ["interleaved", "disaggregated"])
def test_text_of_many_streams_at_once_comes_in_whole_characters(result, mode):
    assert result[mode]["texts"] == result[mode]["expected_texts"]


@pytest.mark.parametrize("mode", ["interleaved", "disaggregated"])
def test_nothing_compiles_while_they_serve(result, mode):
    assert result[mode]["compiled_while_serving"] == 0


def test_sampled_tokens_carry_our_logprobs_and_versions(result):
    verbs = result["verbs"]

    assert verbs["is_engine"]
    for slot, expected in enumerate(verbs["expected_tokens"]):
        n = len(expected)
        assert verbs["tokens"][slot][:n] == expected
        assert verbs["versions"][slot] == [7] * n + [-1] * (10 - n)
        assert verbs["lengths"][slot] == list(range(1, 11))
        np.testing.assert_allclose(
            verbs["logprobs"][slot][:n], verbs["expected_logprobs"][slot], rtol=0, atol=1e-5
        )


def test_the_examples_of_the_page_run(result):
    assert 1 <= len(result["page"]["tokens"]) <= 5
    assert result["page"]["versions"] == [-1, -1]  # both slots are empty
