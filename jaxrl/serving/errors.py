"""What an error of jaxrl is called in each protocol: one table for HTTP and gRPC."""

from __future__ import annotations

import dataclasses

from jaxrl.errors import (
    AuthenticationError,
    DataError,
    DeadlineError,
    DriverError,
    JaxrlError,
    NotReadyError,
    QueueFullError,
    RequestError,
)

RETRY_AFTER_S = 1
"""When to try again after an error that passes, in seconds."""


@dataclasses.dataclass(frozen=True)
class Status:
    """An error in public: the HTTP status, OpenAI's type and code, the name of gRPC's status."""

    http: int
    type: str
    code: str
    grpc: str

    @property
    def passes(self) -> bool:
        """Whether the same request may succeed later."""
        return self.http in (429, 503)


class FieldError(RequestError):
    """A field of a request breaks a rule; `param` names it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param, self.code = param, code


class ModelNotFoundError(FieldError):
    """The request names a model that is not served here."""


INTERNAL = Status(500, "server_error", "internal_error", "INTERNAL")
"""Everything that is not the fault of whoever asked."""

STATUSES: dict[type[JaxrlError], Status] = {
    RequestError: Status(400, "invalid_request_error", "invalid_request", "INVALID_ARGUMENT"),
    ModelNotFoundError: Status(404, "invalid_request_error", "model_not_found", "NOT_FOUND"),
    DataError: Status(400, "invalid_request_error", "invalid_text", "INVALID_ARGUMENT"),
    AuthenticationError: Status(401, "invalid_request_error", "invalid_api_key", "UNAUTHENTICATED"),
    QueueFullError: Status(429, "rate_limit_error", "queue_full", "RESOURCE_EXHAUSTED"),
    NotReadyError: Status(503, "server_error", "not_ready", "UNAVAILABLE"),
    DeadlineError: Status(504, "timeout_error", "deadline_exceeded", "DEADLINE_EXCEEDED"),
    DriverError: Status(500, "server_error", "engine_failed", "INTERNAL"),
    JaxrlError: INTERNAL,
}
"""A subclass without a row has that of the nearest class above it."""


def status_of(error: BaseException) -> Status:
    """The status of any error; `INTERNAL` for those that are not jaxrl's."""
    return next((STATUSES[c] for c in type(error).__mro__ if c in STATUSES), INTERNAL)


def message_of(error: BaseException) -> str:
    """What a client is told, on one line: nothing of errors that nobody meant to raise."""
    if isinstance(error, JaxrlError):
        return " ".join(str(error).split())
    return "an internal error; the server's log has more"
