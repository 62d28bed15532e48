"""The exception tree: every error a user can meet, raised at the edge with what to do about it.

Owns: the types.  Does not own: wording (the raiser writes one clear line).  Inside the core, broken invariants are
``assert`` plus the audit (:class:`AuditError`), not these.
"""

from __future__ import annotations


class OstinatoError(Exception):
    """Base of all errors that Ostinato raises on purpose."""


class ConfigError(OstinatoError, ValueError):
    """A flag, field or file has a value that cannot work."""


class UnknownModelError(ConfigError):
    """The model's name is neither known here, nor a directory, nor a hub id that can be reached."""


class ModelRefusedError(OstinatoError):
    """The model was found, but running it here could give wrong tokens; the message says why."""


class ModelFileError(OstinatoError):
    """A model file is damaged, or is not the file that was pinned."""


class CapacityError(ConfigError):
    """A pool or budget is too small (the message states the minimum) or larger than the machine."""


class RequestError(OstinatoError, ValueError):
    """One request cannot be served; others are unaffected."""


class PromptTooLongError(RequestError):
    """The prompt and its requested output exceed the model's context or the pool."""


class SamplingError(RequestError):
    """A sampling parameter is out of range."""


class NotCachedError(RequestError):
    """What the request is about is not in the cache."""


class CacheLimitError(RequestError):
    """More would be pinned, or kept hidden, than is allowed."""


class StoppedError(OstinatoError):
    """Whoever runs the engine wants it to stop: a signal, for example."""


class UnknownConnectorError(ConfigError):
    """No connector has this name; the message lists those that exist."""


class ConnectorError(OstinatoError):
    """A connector could not be built or broke its contract."""


class StaleViewError(ConnectorError):
    """A borrowed block view was used after the hook that received it returned."""


class AuditError(OstinatoError):
    """The ledger does not add up: a bug in Ostinato, never the user's fault."""
