"""Requests that cannot be served are refused at the door, with the value and the rule."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from jaxrl.errors import DriverError, RequestError
from jaxrl.inference.requests import Limits, Request, check_request
from jaxrl.types import SamplingParams

LIMITS = Limits(vocab_size=40, max_length=16, max_stop_tokens=2)
GOOD = SamplingParams(max_tokens=4)


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([], GOOD, "empty"),
        ([[1, 2]], GOOD, r"shape \(1, 2\)"),
        ([1.5, 2.0], GOOD, "integers.*float64"),
        ([True], GOOD, "integers.*bool"),
        ([1, 40], GOOD, "token 40 at position 1.*0 to 39"),
        ([-1], GOOD, "token -1 at position 0"),
        ([1] * 13, GOOD, r"13 tokens \+ max_tokens=4 = 17.*16"),
        ([1], SamplingParams(max_tokens=0), "max_tokens=0.*at least 1"),
        ([1], SamplingParams(max_tokens=2.5), "max_tokens=2.5.*integer"),
        ([1], SamplingParams(max_tokens=4, temperature=-0.1), "temperature=-0.1"),
        ([1], SamplingParams(max_tokens=4, temperature=float("nan")), "temperature=nan"),
        ([1], SamplingParams(max_tokens=4, temperature=float("inf")), "temperature=inf"),
        ([1], SamplingParams(max_tokens=4, temperature=1e-60), "temperature=1e-60.*float32"),
        ([1], SamplingParams(max_tokens=4, temperature=1e60), "temperature=1e.60.*float32"),
        ([1], SamplingParams(max_tokens=4, top_k=-1), "top_k=-1"),
        ([1], SamplingParams(max_tokens=4, top_k=2**31), "top_k=2147483648"),
        ([1], SamplingParams(max_tokens=4, top_p=0.0), "top_p=0.0"),
        ([1], SamplingParams(max_tokens=4, top_p=1.01), "top_p=1.01"),
        ([1], SamplingParams(max_tokens=4, top_p=float("nan")), "top_p=nan"),
        ([1], SamplingParams(max_tokens=4, top_logprobs=1), "top_logprobs=1.*from 0 to 0"),
        ([1], SamplingParams(max_tokens=4, seed=1.5), "seed=1.5"),
        ([1 << 40], GOOD, "token 1099511627776 at position 0"),
        ([1 << 80], GOOD, "integers"),
        ([1], SamplingParams(max_tokens=4, stop_tokens=(1, 2, 3)), "3 stop tokens.*at most 2"),
        ([1], SamplingParams(max_tokens=4, stop_tokens=(40,)), "stop token 40"),
        ([1], SamplingParams(max_tokens=4, stop_tokens=None), "stop_tokens=None"),
        ([[1], [1, 2]], GOOD, "flat list"),
        (np.array([1], "m8[s]"), GOOD, "integers.*timedelta"),
        ([1], SamplingParams(max_tokens=np.int8(127)), r"1 tokens \+ max_tokens=127 = 128"),
        ([1], SamplingParams(max_tokens=np.int64(2**63 - 1)), "beyond the context"),
        ([1], SamplingParams(max_tokens=4, temperature="1"), "temperature='1' must be a number"),
        ([1], SamplingParams(max_tokens=4, temperature=10**400), "must be a number"),
        ([1], SamplingParams(max_tokens=4, top_p=None), "top_p=None must be a number"),
        ([1], SamplingParams(max_tokens=4, top_p=np.array([0.5, 0.5])), "must be a number"),
    ],
)
def test_bad_request_is_refused_with_value_and_rule(tokens, params, message):
    with pytest.raises(RequestError, match=message):
        check_request(tokens, params, LIMITS)


def test_prompt_that_just_fits_is_accepted_as_a_copy():
    tokens = np.arange(12, dtype=np.int64)

    prompt, _ = check_request(tokens, GOOD, LIMITS)
    tokens[0] = 5

    assert prompt.dtype == np.int32
    np.testing.assert_array_equal(prompt, np.arange(12))


def test_accepted_parameters_are_the_requests_own_plain_numbers():
    stops = [1, 2]

    _, params = check_request(
        [1],
        SamplingParams(
            np.int64(4), np.float32(0.5), np.int64(-1), stops, np.uint8(3), Fraction(1, 2)
        ),
        LIMITS,
    )
    stops.append(3)

    assert params == SamplingParams(4, 0.5, -1, (1, 2), 3, 0.5)
    assert {type(value) for value in (params.max_tokens, params.seed, params.top_k)} == {int}


def _rows(tokens, logps, versions):
    bits = np.array(logps, np.float32).view(np.int32)
    return np.stack([tokens, np.ones(len(tokens)), versions, bits], -1).astype(np.int32)


def _request(**params) -> Request:
    return Request(0, np.array([1], np.int32), SamplingParams(**params), future=None)


def test_results_of_dispatches_are_joined_and_invalid_steps_skipped():
    request = _request(max_tokens=3)
    first = _rows([5, 6, 0, 0], [-1.0, -2.0, 0, 0], [3, 3, 0, 0])
    first[2:, 1] = 0

    request.take(first)
    request.take(_rows([7], [-0.5], [4]))

    completion = request.completion()
    np.testing.assert_array_equal(completion.tokens, [5, 6, 7])
    np.testing.assert_array_equal(completion.versions, [3, 3, 4])
    np.testing.assert_array_equal(completion.logprobs, np.float32([-1, -2, -0.5]))
    assert (completion.finish_reason, request.finished) == ("length", True)


def test_stop_token_at_the_limit_counts_as_stop_and_is_left_out_of_the_text():
    class Letters:
        def decode(self, ids):
            return "".join(chr(97 + i) for i in ids)

    request = _request(max_tokens=2, stop_tokens=(9,))
    request.take(_rows([4, 9], [-1, -4.5], [0, 0]))

    completion = request.completion(Letters())

    assert (completion.finish_reason, completion.text) == ("stop", "e")
    assert completion.logprobs[1] == np.float32(-4.5)


def test_not_a_number_logprob_is_a_driver_error_naming_the_version():
    request = _request(max_tokens=2)
    request.take(_rows([4, 9], [-1, np.nan], [0, 6]))

    with pytest.raises(DriverError, match="version 6 gave log-probability nan for token 1"):
        request.completion()
