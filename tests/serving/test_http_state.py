"""What the server does beside generating: state, token, queue, time, versions, metrics."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from serving.servers import NAME, serving, until

from jaxrl.errors import ConfigError, WeightVersionError
from jaxrl.serving.auth import VARIABLE, load_token
from jaxrl.serving.http_server import start_http
from jaxrl.types import WeightVersion

SECRET = "very-secret-token"
ASK = {"prompt": "Hi", "max_tokens": 100, "ignore_eos": True}
PAGES = ("/", "/status", "/metrics", "/v1/models")


def metrics_of(server):
    """Sample name, with its labels -> value."""
    _, headers, text = server.request("GET", "/metrics")
    assert headers.get_content_type() in ("text/plain", "application/openmetrics-text")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def present(driver):
    """Requests that run or wait."""
    stats = driver.stats()
    return stats.running + stats.waiting


@contextlib.contextmanager
def asking(server, **fields):
    """A connection over which a completion is asked for, and not read."""
    body = json.dumps({**ASK, **fields}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.server.port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        yield connection


def test_server_that_loads_says_so_and_becomes_ready(tiny):
    with serving(None) as server:
        before = [
            server.request("GET", path)[0] for path in ("/health", "/v1/models", "/", "/status")
        ]
        status, headers, answer = server.request("POST", "/v1/completions", {"prompt": "Hi"})
        loading = metrics_of(server)[("jaxrl_ready", ())]
        with tiny.driver() as driver:
            server.backend.open(driver)
            health = server.request("GET", "/health")
            after = server.complete(prompt="Hi", max_tokens=1)

    assert before == [503, 503, 200, 200]
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    assert headers["Retry-After"] == "1"
    assert loading == 0
    assert (health[0], health[2]) == (200, {"status": "ready"})
    assert after[0] == 200


def test_token_is_needed_everywhere_but_for_health(tiny):
    with tiny.driver() as driver, serving(driver, token=SECRET) as server:
        with_token = [
            server.request("GET", p)[0] for p in ("/", "/status", "/metrics", "/v1/models")
        ]
        server.token = None
        without = [
            server.request("GET", p)[0] for p in ("/", "/status", "/metrics", "/v1/models", "/x")
        ]
        posted = server.request("POST", "/v1/completions", {"prompt": "Hi"})
        health = server.request("GET", "/health")[0]
        wrong = [
            server.request("GET", "/v1/models", headers={"Authorization": value})[0]
            for value in (
                "Bearer",
                f"Bearer {SECRET}x",
                f"Bearer {SECRET[:-1]}",
                SECRET,
                "Bearer é",
            )
        ]

    assert with_token == [200] * 4
    assert without == [401] * 5
    assert (posted[0], posted[2]["error"]["code"]) == (401, "invalid_api_key")
    assert posted[1]["WWW-Authenticate"] == "Bearer"
    assert SECRET not in posted[2]["error"]["message"]
    assert health == 200
    assert wrong == [401] * 5


def test_browser_may_send_the_token_as_a_password_to_see_pages(tiny):
    basic = base64.b64encode(f"me:{SECRET}".encode()).decode()
    headers = {"Authorization": f"Basic {basic}"}

    with tiny.driver() as driver, serving(driver, token=SECRET) as server:
        server.token = None
        asked = server.request("GET", "/")
        pages = [server.request("GET", p, headers=headers)[0] for p in ("/", "/status", "/metrics")]
        models = server.request("GET", "/v1/models", headers=headers)[0]
        garbage = server.request("GET", "/", headers={"Authorization": "Basic \u00ff=="})[0]

    assert asked[1]["WWW-Authenticate"] == 'Basic realm="jaxrl"'
    assert pages == [200] * 3
    assert (models, garbage) == (401, 401)


def test_token_comes_from_a_file_or_the_environment(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")

    assert load_token(str(file), {VARIABLE: "another-token"}) == SECRET
    assert load_token("", {VARIABLE: SECRET}) == SECRET
    assert load_token("", {}) is None
    with pytest.raises(ConfigError, match="cannot be read"):
        load_token(str(tmp_path / "none"), {})
    for bad in ("", "short", "has spaces inside", "ünïcödé-token"):
        with pytest.raises(ConfigError, match="at least 8 visible ASCII") as caught:
            load_token("", {VARIABLE: bad})
        assert not bad or bad not in str(caught.value)


def test_full_queue_refuses_and_says_when_to_come_back(tiny, gate):
    with tiny.driver(gate, max_waiting=2) as driver, serving(driver, max_waiting=2) as server:
        with contextlib.ExitStack() as stack:
            # As many as there are slots, and two more.
            for _ in range(6):
                stack.enter_context(asking(server))
            until(lambda: present(driver) == 6)
            status, headers, answer = server.request("POST", "/v1/completions", ASK)
            stream = server.request("POST", "/v1/completions", {**ASK, "stream": True})[0]
            many = server.request("POST", "/v1/completions", {**ASK, "n": 3})
            counts = metrics_of(server)
            gate.open.set()
            until(lambda: driver.stats().finished == 6)

    assert (status, headers["Retry-After"]) == (429, "1")
    assert (answer["error"]["type"], answer["error"]["code"]) == ("rate_limit_error", "queue_full")
    assert stream == 429
    # It would not fit into an empty queue either: coming back is no use.
    assert (many[0], many[2]["error"]["param"]) == (400, "n")
    assert counts[("jaxrl_running", ())] + counts[("jaxrl_waiting", ())] == 6
    assert counts[("jaxrl_refused_total", ())] == 2
    assert counts[("jaxrl_requests_total", (("outcome", "queue_full"),))] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_frees_its_slots(tiny, gate, stream):
    with tiny.driver(gate) as driver, serving(driver) as server:
        with asking(server, stream=stream, n=3):
            until(lambda: present(driver) == 3)
            if stream:  # its first pieces are on their way
                gate.open.set()
                until(lambda: driver.stats().dispatches >= 1)
        until(lambda: driver.stats().cancelled == 3, "the cancellation")
        gate.open.set()
        until(lambda: driver.stats().running == 0)
        status, _ = server.complete(prompt="Hi", max_tokens=1)
        until(lambda: server.metrics.outcomes["cancelled"] == 3)
        responses = metrics_of(server)

    assert status == 200
    assert driver.stats().finished == 1
    if not stream:
        labels = (("endpoint", "/v1/completions"), ("status", "499"))
        assert responses[("jaxrl_http_responses_total", labels)] == 1


def test_client_that_leaves_as_its_stream_begins_is_no_error_of_ours(shared, monkeypatch, caplog):
    prepare = web.StreamResponse.prepare

    async def prepare_late(response, request):
        if isinstance(response, web.Response):
            return await prepare(response, request)
        request.transport.close()
        return await prepare(response, request)

    monkeypatch.setattr(web.StreamResponse, "prepare", prepare_late)
    with asking(shared, stream=True) as connection:
        assert connection.recv(65536) == b""

    until(lambda: present(shared.backend.driver) == 0)
    assert caplog.text == ""


def test_client_that_leaves_the_queue_is_never_decoded(tiny, gate):
    with tiny.driver(gate) as driver, serving(driver) as server:
        with asking(server, n=4), asking(server, prompt="Ho"):
            until(lambda: present(driver) == 5)
        until(lambda: driver.stats().waiting == 0, "leaving the queue")
        gate.open.set()
        until(lambda: driver.stats().running == 0)

    assert driver.stats().cancelled == 5


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_runs_out_of_time_is_told(tiny, gate, stream):
    with tiny.driver(gate) as driver, serving(driver, timeout_s=0.2) as server:
        threading.Timer(0.5, gate.open.set).start()
        status, _, answer = server.request("POST", "/v1/completions", {**ASK, "stream": stream})

    # The first token may have come in time; then the error is the last event.
    assert status == 504 or (stream and status == 200)
    assert "deadline_exceeded" in str(answer)
    assert driver.stats().expired == 1


def test_error_behind_the_first_piece_is_the_last_event(tiny, gate):
    gate.open.set()
    with tiny.driver(gate) as driver, serving(driver) as server:
        with asking(server, stream=True) as connection:
            answer = connection.recv(65536)
            gate.error = RuntimeError("the chip is gone")
            while more := connection.recv(65536):
                answer += more
        status, _, later = server.request("POST", "/v1/completions", ASK)
        health = server.request("GET", "/health")

    events = [line for line in answer.decode().splitlines() if line.startswith("data: ")]
    last = json.loads(events[-1].removeprefix("data: "))
    assert "the chip is gone" in last["error"]["message"]
    assert "[DONE]" not in answer.decode()
    assert (status, later["error"]["code"]) == (500, "engine_failed")
    assert "the chip is gone" in later["error"]["message"]
    assert (health[0], health[2]["status"]) == (503, "failed")


def test_failed_engine_answers_everybody_who_waits(tiny, gate):
    gate.error = RuntimeError("the chip is gone")
    with tiny.driver(gate) as driver, serving(driver) as server, ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(server.complete, **ASK) for _ in range(8)]
        until(lambda: present(driver) == 8)
        gate.open.set()
        answers = [future.result(60) for future in waiting]

    assert {status for status, _ in answers} == {500}
    assert all("the chip is gone" in answer["error"]["message"] for _, answer in answers)


def test_new_weights_are_named_token_by_token(tiny, gate):
    with tiny.driver(gate, in_flight="continue") as driver, serving(driver) as server:
        with ThreadPoolExecutor(2) as pool:
            asked = {**ASK, "max_tokens": 12, "logprobs": 0}
            answer = pool.submit(server.complete, **asked)
            assert gate.reached.wait(60)
            swap = pool.submit(server.backend.set_weights, tiny.params[1], tiny.versions[1])
            until(lambda: driver._swap is not None)
            gate.open.set()
            swap.result(60)
            answer = answer.result(60)[1]
        events = server.events("/v1/completions", **ASK)
        model = server.request("GET", "/v1/models")[2]["data"][0]

    old, new = ({"number": n, "digest": tiny.versions[n].digest} for n in (0, 1))
    assert answer["weight_version"] == {"first": old, "last": new}
    assert answer["choices"][0]["weight_version"] == {"first": old, "last": new}
    assert answer["weight_versions"] == [old, new]
    assert answer["system_fingerprint"] == str(tiny.versions[1])
    versions = answer["choices"][0]["logprobs"]["versions"]
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}
    assert all(event["weight_version"] == {"first": new, "last": new} for event in events[:-1])
    assert model["weight_version"] == new


def test_weights_that_are_refused_leave_the_known_digests_alone(tiny):
    with tiny.driver() as driver, serving(driver) as server:
        with pytest.raises(WeightVersionError):
            server.backend.set_weights(tiny.params[1], WeightVersion(0, "0" * 64))
        _, answer = server.complete(prompt="Hi", max_tokens=1)

    assert answer["weight_version"]["last"]["digest"] == tiny.versions[0].digest


def test_metrics_count_what_was_served(tiny):
    with tiny.driver() as driver, serving(driver) as server:
        for _ in range(3):
            server.complete(prompt="Hi there", max_tokens=9, ignore_eos=True)
        server.complete(prompt="Hi", temperature=-1)
        counts = metrics_of(server)

    assert counts[("jaxrl_requests_total", (("outcome", "ok"),))] == 3
    assert counts[("jaxrl_time_to_first_token_seconds_count", ())] == 3
    # The first tokens of each came together.
    assert 3 <= counts[("jaxrl_inter_token_seconds_count", ())] <= 24
    assert counts[("jaxrl_tokens_total", ())] == 27
    assert counts[("jaxrl_slots", ())] == 4
    assert counts[("jaxrl_ready", ())] == 1
    assert counts[("jaxrl_kv_bytes", ())] == tiny.engine.cache_bytes
    assert counts[("jaxrl_weight_version", ())] == 0
    assert counts[("jaxrl_prefix_tokens_total", ())] == 24
    info = next(dict(labels) for name, labels in counts if name == "jaxrl_weights_info")
    assert info["digest"] == tiny.versions[0].digest
    labels = (("endpoint", "/v1/completions"), ("status", "400"))
    assert counts[("jaxrl_http_responses_total", labels)] == 1


def test_paths_that_clients_make_up_are_one_metric(tiny):
    with tiny.driver() as driver, serving(driver) as server:
        for path in ("/a", "/b", "/v1/models/x", "/v1/models/y"):
            server.request("GET", path)
        names = {
            dict(labels)["endpoint"]
            for name, labels in metrics_of(server)
            if name == "jaxrl_http_responses_total"
        }

    assert names == {"unknown", "/v1/models/{model}"}


def test_port_that_is_taken_is_an_error(shared):
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {shared.server.port}"):
        shared.call(start_http(shared.backend, "127.0.0.1", shared.server.port))


def test_many_clients_at_once_are_all_answered(tiny):
    with tiny.driver() as driver, serving(driver) as server, ThreadPoolExecutor(24) as pool:
        asks = [{"prompt": f"Hi {i}", "max_tokens": 6, "temperature": 0} for i in range(48)]
        together = list(pool.map(lambda ask: server.complete(**ask)[1], asks))
        alone = [server.complete(**ask)[1] for ask in asks[::12]]

    assert [a["choices"][0]["text"] for a in alone] == [
        a["choices"][0]["text"] for a in together[::12]
    ]
    assert {answer["model"] for answer in together} == {NAME}
