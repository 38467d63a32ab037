"""Training's programs on a TPU slice, checked with the TPU compiler on a machine without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import tpu_rows
from tpu_compiler import report_of


@pytest.fixture(scope="module")
def report():
    """What the compiled programs hold, by case."""
    return report_of(Path(tpu_rows.__file__))


@pytest.mark.slow
def test_rows_on_a_slice_use_the_kernel_and_hold_no_scores(report):
    for name, program in report.items():
        assert program["kernels"] >= 3, name  # forward, gradients of queries, of keys and values
        assert program["scores"] == 0, name


@pytest.mark.slow
def test_weights_gradients_on_a_slice_are_scattered(report):
    for name in ("dense", "narrow heads and windows", "context", "narrow and unrolled"):
        assert report[name]["collectives"]["reduce-scatter"] >= 8, name
        # Whole on each device are only the gradients of what is not split: scales of norms.
        assert report[name]["largest sum"] <= tpu_rows.LENGTH, name


@pytest.mark.slow
def test_experts_on_a_slice_are_sent_tokens_and_compute_only_what_was_chosen(report):
    config = {**tpu_rows.SIZES, **tpu_rows.EXPERTS}
    tokens = 4 * tpu_rows.LENGTH // 4
    # The products of all experts, in one layer, forwards, recomputed, and twice backwards.
    width, inner, experts = (config[name] for name in ("d_model", "mlp_dim", "n_experts"))
    everything = 4 * 6 * tokens * width * inner * experts
    for name in ("experts", "experts in parts", "experts whole"):
        assert report[name]["flops"] < everything, name
    assert report["experts"]["collectives"]["all-to-all"] >= 4
    assert report["experts whole"]["collectives"]["all-to-all"] == 0
