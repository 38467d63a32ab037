"""Weights that are spread over processes, and a whole copy for the sampler of each."""

from __future__ import annotations

import pytest
from distributed.processes import Job

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("order", ["mixed", pytest.param("ordered", marks=pytest.mark.slow)])
def test_every_process_gets_the_whole_copy_whatever_the_order_of_devices(tmp_path, order):
    with Job(tmp_path, order, 2, devices=2, worker="weights/copies_worker.py") as job:
        ended = job.ended()

    assert [each.code for each in ended] == [0, 0], "\n".join(each.text for each in ended)
    first, second = (each.out.splitlines()[-1] for each in ended)
    assert first == second
