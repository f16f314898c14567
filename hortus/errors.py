"""Every error a caller can meet, and the one table that says what each means on the wire.

    HortusError
    |-- StartError            the process cannot start: bad configuration, a model that cannot be served
    `-- RequestError          one request fails, nothing else does
        |-- InvalidInput      400   the request is wrong; names what, and which limit and flag
        |   |-- TooLong       400   an input has more tokens than the model takes
        |   |-- ModelNotFound 404
        |   |-- RouteNotFound 404
        |   |-- MethodNotAllowed 405
        |   |-- BodyTooLarge  413
        |   |-- WrongKind     424   the route needs another kind of model than the one served
        |   `-- Unauthorized  401
        |-- Overloaded        429   the queue is full; retry after `retry_after_s`
        |-- Cancelled         499   the caller went away
        |-- EngineError       500   the step failed
        |   |-- NonFinite     500   the model gave NaN or Inf for this input
        |   `-- OutOfMemory   503   the step did not fit, even alone
        |-- NotReady          503   starting, or the engine stopped answering
        |-- Draining          503   shutting down
        `-- DeadlineExceeded  504

Knows no HTTP library: only numbers.
"""

from __future__ import annotations

import traceback
from typing import NamedTuple


class Wire(NamedTuple):
    """What one error code is on the wire."""

    http: int
    grpc: str
    """Name of the gRPC status code."""
    retryable: bool
    type: str
    """The `type` of OpenAI's error object."""


TABLE: dict[str, Wire] = {
    "invalid_input": Wire(400, "INVALID_ARGUMENT", False, "invalid_request_error"),
    "context_length_exceeded": Wire(400, "INVALID_ARGUMENT", False, "invalid_request_error"),
    "unauthorized": Wire(401, "UNAUTHENTICATED", False, "authentication_error"),
    "model_not_found": Wire(404, "NOT_FOUND", False, "invalid_request_error"),
    "route_not_found": Wire(404, "UNIMPLEMENTED", False, "invalid_request_error"),
    "method_not_allowed": Wire(405, "UNIMPLEMENTED", False, "invalid_request_error"),
    "body_too_large": Wire(413, "RESOURCE_EXHAUSTED", False, "invalid_request_error"),
    "wrong_model_kind": Wire(424, "FAILED_PRECONDITION", False, "invalid_request_error"),
    "overloaded": Wire(429, "RESOURCE_EXHAUSTED", True, "rate_limit_error"),
    "cancelled": Wire(499, "CANCELLED", False, "invalid_request_error"),
    "engine_error": Wire(500, "INTERNAL", False, "server_error"),
    "non_finite": Wire(500, "INTERNAL", False, "server_error"),
    "out_of_memory": Wire(503, "RESOURCE_EXHAUSTED", True, "server_error"),
    "not_ready": Wire(503, "UNAVAILABLE", True, "server_error"),
    "draining": Wire(503, "UNAVAILABLE", True, "server_error"),
    "deadline_exceeded": Wire(504, "DEADLINE_EXCEEDED", True, "server_error"),
}


class HortusError(Exception):
    """Root of all of ours."""


class StartError(HortusError):
    """The process cannot start. The message says what to change; the CLI prints it without a traceback."""


class RequestError(HortusError):
    """One request failed. `code` is the key into TABLE."""

    code = "engine_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """The request's field that is at fault, such as `input[3]`; None when no single field is."""

    @property
    def wire(self) -> Wire:
        return TABLE[self.code]


def bare(error: BaseException) -> None:
    """Take from an error, and from those it came of, the frames it came through, once it has been told: they hold the request,
    and mostly the error too, and such a ring stays until the cyclic collector runs, body and all."""
    left = [error]
    while left:
        error = left.pop()
        left += [e for e in (error.__cause__, error.__context__) if e is not None]
        left += error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        error.__traceback__ = error.__cause__ = error.__context__ = None


def first_of(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """What failed first in an asyncio.TaskGroup. Cancelled just then, the group's last frame keeps that in a variable, and it the
    frame: the variables are let go."""
    traceback.clear_frames(failures.__traceback__)
    return failures.exceptions[0]


class InvalidInput(RequestError):
    code = "invalid_input"


class TooLong(InvalidInput):
    code = "context_length_exceeded"


class ModelNotFound(InvalidInput):
    code = "model_not_found"


class RouteNotFound(InvalidInput):
    code = "route_not_found"


class MethodNotAllowed(InvalidInput):
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str = "") -> None:
        super().__init__(message)
        self.allow = allow
        """The methods there are, as the Allow header lists them."""


class BodyTooLarge(InvalidInput):
    code = "body_too_large"


class WrongKind(InvalidInput):
    code = "wrong_model_kind"


class Unauthorized(InvalidInput):
    code = "unauthorized"


class Overloaded(RequestError):
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Cancelled(RequestError):
    code = "cancelled"


class EngineError(RequestError):
    code = "engine_error"


class NonFinite(EngineError):
    code = "non_finite"


class OutOfMemory(EngineError):
    code = "out_of_memory"


class NotReady(RequestError):
    code = "not_ready"


class Draining(RequestError):
    code = "draining"


class DeadlineExceeded(RequestError):
    code = "deadline_exceeded"
