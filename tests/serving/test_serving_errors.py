"""Every error of jaxrl has one status in each protocol."""

from __future__ import annotations

import pytest

from jaxrl import errors
from jaxrl.serving.errors import INTERNAL, STATUSES, message_of, status_of

ALL = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.JaxrlError)]
GRPC = {
    "INVALID_ARGUMENT",
    "UNAUTHENTICATED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
}


@pytest.mark.parametrize("error", ALL)
def test_every_error_has_a_status(error):
    status = status_of(error("x"))

    assert status.grpc in GRPC
    assert 400 <= status.http < 600
    assert (status.http < 500) == status.grpc.startswith(("INVALID", "UNAUTH", "RESOURCE"))


def test_subclass_has_the_status_of_the_class_above_it():
    class Special(errors.QueueFullError):
        """One that has no status of its own."""

    assert status_of(Special("x")) is STATUSES[errors.QueueFullError]
    assert status_of(Special("x")).passes
    assert not status_of(errors.RequestError("x")).passes


def test_error_that_nobody_meant_says_nothing_of_itself():
    error = KeyError("a secret")

    assert status_of(error) is INTERNAL
    assert "secret" not in message_of(error)
    assert message_of(errors.RequestError("a\n b")) == "a b"
