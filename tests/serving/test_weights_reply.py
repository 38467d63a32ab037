"""What a server says of its weights, and when."""

from __future__ import annotations

import threading
import time

import pytest
from serving.servers import serving, until

from jaxrl.types import WeightVersion


class Run:
    """A follower whose run has what a test says."""

    def __init__(self, newest):
        self.loading, self.problem, self.version, self.asked = None, "", newest, 0

    def look(self):
        self.asked += 1
        return self.asked

    def newest(self, ticket):
        return self.version


@pytest.fixture
def server(tiny):
    with tiny.driver() as driver, serving(driver, follows=True) as server:
        server.backend.model_meaning = {"d_model": 32}
        server.backend.follower = Run(tiny.versions[0])
        yield server


def ask(server, number, digest, wait_s):
    """(body, seconds until it came)."""
    began = time.monotonic()
    query = f"number={number}&digest={digest}&wait_s={wait_s}"
    status, _, body = server.request("GET", f"/v1/weights?{query}")
    assert status == 200
    return body, time.monotonic() - began


def test_weights_are_told_with_what_the_server_can_do(server, tiny):
    server.backend.follower.loading = 7
    server.backend.follower.problem = "no room"

    body = server.request("GET", "/v1/weights")[2]

    version = {"number": 0, "digest": tiny.versions[0].digest}
    assert body == {
        "object": "weights",
        "state": "ready",
        "model": "tiny",
        "serving": version,
        "newest": version,
        "loading": 7,
        "problem": "no room",
        "follows": True,
        "max_length": 128,
        "room": 8,
        "logprobs": "sampled",
        "model_meaning": {"d_model": 32},
    }


def test_server_that_loads_says_so_and_nothing_else():
    with serving(None) as server:
        status, _, body = server.request("GET", "/v1/weights?number=0&digest=a&wait_s=0.05")

    assert (status, body) == (200, {"object": "weights", "state": "loading", "model": "tiny"})


def test_version_that_is_served_is_answered_at_once(server, tiny):
    _, seconds = ask(server, 0, tiny.versions[0].digest, 30)

    assert seconds < 15


def test_version_that_does_not_come_is_answered_when_the_time_is_over(server, tiny):
    body, seconds = ask(server, 1, tiny.versions[1].digest, 0.3)

    assert seconds >= 0.3
    assert body["serving"]["number"] == 0
    # It has not only looked once.
    assert server.backend.follower.asked >= 3


def test_version_that_comes_meanwhile_is_answered_when_it_is_there(server, tiny):
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.append(ask(server, 1, tiny.versions[1].digest, 30))
    )

    waiting.start()
    until(lambda: server.backend.follower.asked > 0, "the look")
    server.backend.set_weights(tiny.params[1], tiny.versions[1])
    waiting.join(60)

    body, seconds = answers[0]
    assert body["serving"] == {"number": 1, "digest": tiny.versions[1].digest}
    assert seconds < 25


@pytest.mark.parametrize("number", [1, 5])
def test_run_with_another_version_in_its_place_is_answered_at_once(server, number):
    server.backend.follower.version = WeightVersion(number, "f" * 64)

    body, seconds = ask(server, 1, "a" * 64, 30)

    assert seconds < 15
    assert body["newest"] == {"number": number, "digest": "f" * 64}


@pytest.mark.parametrize("query", ["number=a", "number=1&wait_s=b", "number=1&wait_s=31"])
def test_query_that_makes_no_sense_is_refused(server, query):
    status, _, body = server.request("GET", f"/v1/weights?{query}")

    assert status == 400
    assert "wait_s" in body["error"]["message"]


def test_stop_token_ends_a_completion_and_is_checked(server):
    free = server.complete(
        prompt=[70, 71], max_tokens=6, seed=3, ignore_eos=True, return_token_ids=True
    )[1]["choices"][0]["token_ids"]

    _, stopped = server.complete(
        prompt=[70, 71],
        max_tokens=6,
        seed=3,
        ignore_eos=True,
        return_token_ids=True,
        stop_token_ids=[free[1]],
    )
    status, refused = server.complete(prompt=[70, 71], stop_token_ids=[10**9])

    choice = stopped["choices"][0]
    assert choice["token_ids"] == free[: free.index(free[1]) + 1]
    assert choice["finish_reason"] == "stop"
    assert status == 400
    assert refused["error"]["param"] == "stop_token_ids"
