"""Every error that the engine raises on purpose.

StarlingError
├── InvalidRequest        The caller's fault: one request is refused, `param` names the field.
│   ├── PromptTooLong     The prompt, or prompt + max_tokens, does not fit the model or the cache.
│   └── JobTooLarge       It takes more memory than the process may have that works on it.
├── EngineAsleep          The engine has given its memory back, and takes no request until it is woken.
├── SleepRefused          The engine cannot be put to sleep as it is now; nothing was changed.
├── SleepFailed           Sleeping or waking failed; the message says why, and it can be tried again.
├── QueueFull             Too many requests wait; try again after `retry_after` seconds.
├── RequestFailed         The engine accepted the request but could not finish it.
│   └── EngineDead        The engine core died or makes no progress.
├── RankLost              A rank of the group died, hangs or did not come; the message says which.
│   ├── PeerLost          A rank lost the connection to another one; that one's core knows why.
│   └── DeviceLost        A rank's device failed: no later step would run there.
├── EpochFailed           A change of membership failed, and the old one goes on.
├── OperationRunning      The group's size is being changed already.
├── ConfigError           An engine argument is wrong, `field` names it.
└── ModelError            The checkpoint cannot be served.
    ├── UnsupportedModel  Its architecture or a feature of its config is unknown.
    ├── ModelPackageError An installed package that adds its architecture cannot be used.
    └── WeightError       A tensor is missing, extra or misshapen.
"""

RETRY_AFTER = 1.0
"""Seconds after which a caller may try again when a queue is full."""


class StarlingError(Exception):
    """Base of all errors that Starling raises on purpose."""


class InvalidRequest(StarlingError):
    """A request that cannot be served as asked.

    `param` is the request's field as the user wrote it ("messages[0].content"), or None when no single field is at fault.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class PromptTooLong(InvalidRequest):
    """The prompt does not fit; the message holds both counts."""


class JobTooLarge(InvalidRequest):
    """The request takes more memory than the process may have that works on it."""


class QueueFull(StarlingError):
    """The waiting queue is full. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineAsleep(StarlingError):
    """The engine has given its memory back, and takes no request until it is woken."""


class SleepRefused(StarlingError):
    """Requests run, or this engine cannot sleep; nothing was changed."""


class SleepFailed(StarlingError):
    """Sleeping or waking failed. Cores that were asleep stay asleep, and it can be tried again."""


class RequestFailed(StarlingError):
    """An accepted request ended with an error of the engine, not of the caller."""


class EngineDead(RequestFailed):
    """The engine core process died, or has made no progress for too long."""


class RankLost(StarlingError):
    """A rank of the group died, hangs or did not come, so the others cannot go on. The message names it if it is known."""


class PeerLost(RankLost):
    """A rank lost the connection to another one. Only the core of the rank that was lost first knows which one, and why."""

    @classmethod
    def is_reported_by(cls, last_words: str) -> bool:
        """Returns whether a process with these last words (`Kind: text`) ended only because another one had."""
        return last_words.startswith(f"{cls.__name__}: ")


class DeviceLost(RankLost):
    """A rank's device failed: no later step would run there."""


class EpochFailed(StarlingError):
    """A change of membership could not be prepared. It was undone, and the ranks that served go on."""


class OperationRunning(StarlingError):
    """Another change of the group's size is under way; the message says which. Nothing was changed."""


class ConfigError(StarlingError):
    """An engine argument is wrong. `field` is its name as the user gave it."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class ModelError(StarlingError):
    """The checkpoint cannot be served."""


class UnsupportedModel(ModelError):
    """The architecture, or a feature that the config asks for, is not known to this engine."""


class ModelPackageError(ModelError):
    """A package that adds the model's architecture cannot be used; the message names its distribution and entry point."""


class WeightError(ModelError):
    """A tensor of the checkpoint is missing, unexpected or has the wrong shape; the message names it."""
