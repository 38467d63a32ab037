"""Requests that are wrong, broken or meant to do harm: each has its answer, and others go on."""

from __future__ import annotations

import json
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving.servers import NAME, serving

from jaxrl.errors import DataError, RequestError
from jaxrl.serving.http_server import MAX_BODY
from jaxrl.serving.openai_requests import Ask, read_chat, read_completion

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def goes_on(shared):
    """Whatever a test sends, the server answers the next client."""
    yield
    assert shared.complete(prompt="Hi", max_tokens=1)[0] == 200
    assert shared.backend.driver.stats().running == 0


def refusal(server, path, body, **options):
    """(status, error) of a request."""
    status, _, answer = server.request("POST", path, body, **options)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return status, answer["error"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": None}, "prompt", "prompt must be a text, a list of texts"),
        ({"prompt": []}, "prompt", "not be empty"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": [""]}, "prompt", "prompt is empty"),
        ({"prompt": [[]]}, "prompt", "lists of token ids that are not empty"),
        ({"prompt": {"a": 1}}, "prompt", "prompt must be"),
        ({"prompt": ["a", 1]}, "prompt", "all must be texts"),
        ({"prompt": [1, "a"]}, "prompt", 'token id "a" at place 1'),
        ({"prompt": [True]}, "prompt", "token id true at place 0"),
        ({"prompt": [1.0]}, "prompt", "token id 1.0 at place 0"),
        ({"prompt": [-1]}, "prompt", "token id -1 at place 0 of a prompt must be a whole number"),
        ({"prompt": [10**30]}, "prompt", "from 0 to 261"),
        ({"prompt": [[1], "a"]}, "prompt", "lists of token ids"),
        ({"prompt": ["a"] * 129}, "prompt", "129 prompts: at most 128"),
        ({"prompt": "a" * 500}, "prompt", "beyond the context of 128 tokens"),
        ({"prompt": "\ud800"}, None, "has no token for"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0 must be from 1 to"),
        ({"max_tokens": -5}, "max_tokens", "must be from 1"),
        ({"max_tokens": 10**9}, "max_tokens", "beyond the context of 128 tokens"),
        ({"max_tokens": 10**300}, "max_tokens", "must be from 1 to 2147483647"),
        ({"max_tokens": "8"}, "max_tokens", 'max_tokens="8" must be a whole number, not a text'),
        ({"max_tokens": 1.5}, "max_tokens", "must be a whole number, not a number"),
        ({"max_tokens": True}, "max_tokens", "must be a whole number, not true or false"),
        ({"temperature": 1e300}, "temperature", "must be from 0 to 2.0"),
        ({"temperature": 1e-40}, "temperature", "must be 0 or at least 0.001"),
        ({"temperature": "hot"}, "temperature", "must be a number, not a text"),
        ({"top_p": 0}, None, "top_p=0.0 must be above 0"),
        ({"top_p": 1.1}, "top_p", "must be from 0 to 1"),
        ({"top_k": -2}, "top_k", "must be from -1"),
        ({"n": 0}, "n", "must be from 1 to 128"),
        ({"n": 129}, "n", "must be from 1 to 128"),
        ({"n": 128, "prompt": ["a", "b"]}, "n", "at most 128 completions together"),
        ({"seed": 2**63}, "seed", "must be from -9223372036854775808"),
        ({"seed": 1.0}, "seed", "must be a whole number"),
        ({"logprobs": 6}, "logprobs", "must be from 0 to 5"),
        ({"logprobs": True}, "logprobs", "must be a whole number, not true or false"),
        ({"echo": True}, "echo", "echo=true is not supported"),
        ({"echo": 0}, "echo", "echo=0 is not supported"),
        ({"suffix": "x"}, "suffix", "is not supported"),
        ({"best_of": 3}, "best_of", "use n"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty", "is not supported"),
        ({"stop": 5}, "stop", "stop must be a text or a list of texts"),
        ({"stop": ["a", None]}, "stop", "stop must be a text or a list of texts"),
        ({"stop": ""}, "stop", "must have 1 to 1024 characters"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stream": "yes"}, "stream", "must be true or false, not a text"),
        ({"stream_options": {}}, "stream_options", 'needs "stream": true'),
        (
            {"stream": True, "stream_options": {"include_usag": True}},
            "stream_options.include_usag",
            "unknown field 'stream_options.include_usag'; did you mean include_usage?",
        ),
        ({"stream": True, "stream_options": 1}, "stream_options", "must be an object"),
        ({"model": 3}, "model", "model=3 must be a text"),
        ({"temprature": 1}, "temprature", "unknown field 'temprature'; did you mean temperature?"),
        ({"x" * 10**5: 1}, "x" * 80, "unknown field"),
    ],
)
def test_bad_field_of_a_completion_is_named_with_the_rule(shared, fields, param, message):
    body = {"model": NAME, "prompt": "Hi", **fields}

    status, error = refusal(shared, "/v1/completions", body)

    assert status == 400
    assert message in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": None}, "messages", "a list of at least one message"),
        ({"messages": []}, "messages", "a list of at least one message"),
        ({"messages": ["Hi"]}, "messages[0]", "must be an object"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", "must be one of system"),
        ({"messages": [{"role": "boss", "content": ""}]}, "messages[0].role", "'boss' must be"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a text or a list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
            '"type": "text"',
        ),
        (
            {"messages": [*MESSAGES, {"role": "user", "content": "a", "mood": "good"}]},
            "messages[1].mood",
            "unknown field 'messages[1].mood'",
        ),
        ({"top_logprobs": 2}, "top_logprobs", '"logprobs": true'),
        ({"logprobs": 3}, "logprobs", "must be true or false"),
        ({"logprobs": True, "top_logprobs": 6}, "top_logprobs", "must be from 0 to 5"),
        ({"tools": [{"type": "function"}]}, "tools", "answers are plain text"),
        ({"response_format": {"type": "json_object"}}, "response_format", "is not supported"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
        ({"prompt": "Hi"}, "prompt", "unknown field 'prompt'"),
    ],
)
def test_bad_field_of_a_chat_is_named_with_the_rule(shared, fields, param, message):
    status, error = refusal(shared, CHAT, {"messages": MESSAGES, **fields})

    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object, not a list"),
        (b"null", "must be a JSON object, not null"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ('{"prompt": "Hi"}'.encode("utf-16"), "not UTF-8"),
        (b'{"prompt": "Hi", "temperature": NaN}', "NaN is no JSON number"),
        (b'{"prompt": "Hi", "temperature": Infinity}', "Infinity is no JSON number"),
        (b'{"prompt": "Hi", "temperature": 1e999}', "must be from 0 to 2.0"),
        (b'{"prompt": "Hi", "n": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"prompt": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"prompt": "Hi"} x', "not JSON"),
        (b'{"prompt": "Hi", "seed": 1, "n": 1, "seed": 2}', "'seed' is given twice"),
    ],
)
def test_body_that_is_no_request_is_refused(shared, raw, message):
    status, error = refusal(shared, "/v1/completions", raw)

    assert status == 400
    assert message in error["message"]


def test_body_that_is_too_large_is_refused(shared):
    raw = json.dumps({"prompt": "a" * MAX_BODY}).encode()

    assert refusal(shared, "/v1/completions", raw)[0] == 413


@pytest.mark.parametrize("characters", [10**3, 10**6])
def test_long_text_is_refused_for_its_length_and_not_its_size(shared, characters):
    text = "a" * characters
    chat = {"messages": [{"role": "user", "content": text}]}

    prompt, messages = (
        refusal(shared, "/v1/completions", {"prompt": text}),
        refusal(shared, CHAT, chat),
    )

    assert (prompt[0], prompt[1]["code"]) == (400, "context_length_exceeded")
    assert (messages[0], messages[1]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"Content-Type": "text/plain"}, "Content-Type 'text/plain' must be application/json"),
        ({"Content-Encoding": "gzip"}, "Content-Encoding 'gzip': the body must not be compressed"),
        ({"Content-Type": ""}, "must be application/json"),
    ],
)
def test_body_of_another_kind_is_refused_so_that_no_web_page_can_send_one(shared, headers, message):
    status, error = refusal(shared, "/v1/completions", {"prompt": "Hi"}, headers=headers)

    assert status == 415
    assert message in error["message"]


def test_other_paths_and_methods_are_errors_in_the_same_form(shared):
    status, _, missing = shared.request("GET", "/v1/embeddings")
    wrong, headers, method = shared.request("GET", "/v1/completions")
    model = shared.request("GET", "/v1/models/a/b")

    assert (status, missing["error"]["code"]) == (404, "not_found")
    assert (wrong, headers["Allow"]) == (405, "POST")
    assert method["error"]["type"] == "invalid_request_error"
    assert (model[0], model[2]["error"]["code"]) == (404, "model_not_found")


def test_model_without_a_template_refuses_chats(tiny):
    with tiny.driver() as driver, serving(driver) as server:
        status, error = refusal(server, CHAT, {"messages": MESSAGES})

    assert (status, error["code"]) == (400, "no_chat_template")


def test_fields_without_effect_are_accepted(shared):
    ignored = {"user": "a", "metadata": {"b": 1}, "service_tier": "auto", "store": True}
    neutral = {"presence_penalty": 0, "logit_bias": {}, "best_of": 1, "suffix": None, "seed": None}

    assert shared.complete(prompt="Hi", max_tokens=1, **ignored, **neutral)[0] == 200


NUMBERS = st.integers(-3, 40) | st.integers() | st.floats()
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = ["model", "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "n", "seed"]
NAMES += ["stop", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "tools", "user"]


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6), st.booleans())
def test_any_object_is_read_or_refused_with_a_reason(shared, fields, chat):
    given_ones = {"messages": MESSAGES} if chat else {"prompt": "Hi"}
    raw = json.dumps({**given_ones, **fields}).encode()

    try:
        ask = (read_chat if chat else read_completion)(raw, shared.backend)
    except (RequestError, DataError):
        return  # any other error is one of ours

    assert isinstance(ask, Ask)
    assert len(ask.generations()) == len(ask.prompts) * ask.n


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a client that speaks TLS
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 10000\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_bytes_that_are_no_http_do_not_disturb_others(shared, raw):
    with socket.create_connection(("127.0.0.1", shared.server.port), timeout=60) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        try:
            answer = connection.recv(65536)
        except ConnectionError:
            answer = b""

    assert b" 200 " not in answer


def test_token_in_bytes_that_are_no_http_is_not_logged(shared, caplog):
    with socket.create_connection(("127.0.0.1", shared.server.port), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nAuthorization: Bearer very-secret\x00\r\n\r\n")
        answer = connection.recv(65536)

    assert b" 400 " in answer
    assert caplog.text == ""
