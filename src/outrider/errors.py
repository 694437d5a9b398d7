"""What can go wrong, as one tree.

    OutriderError
    ├── ConfigError          the service cannot start, or a hot change is refused      (start-up error)
    ├── RequestError         the request is wrong: names the field and the cure         (HTTP 400)
    │   └── UnknownModelError   the model is not served here                            (HTTP 404)
    ├── OverloadedError      every place is taken and the queue is full: retry later    (HTTP 429)
    ├── UnavailableError     no verifier could be reached within its bound              (HTTP 503)
    └── GenerationError      the request was admitted and then failed                   (HTTP 500)

`outrider_serve.ingress` maps the tree to HTTP in one place.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Anything Outrider raises on purpose."""


class ConfigError(OutriderError):
    """A configuration value that cannot work; the message names the key, the value and the cure."""


class RequestError(OutriderError):
    """A request that cannot be honoured; `param` names the offending field as the client spelled it."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnknownModelError(RequestError):
    """The request names a model that this service does not serve."""


class OverloadedError(OutriderError):
    """The queue is full; `retry_after_s` is how long the client is asked to wait."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(OutriderError):
    """No verifier could be reached within the bound."""


class GenerationError(OutriderError):
    """An admitted request failed on the verifier, for example by a NaN in its logits."""
