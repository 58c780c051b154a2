"""Every error that the engine raises on purpose.

StarlingError
├── InvalidRequest        the caller's fault: one request is refused, `param` names the field
│   └── PromptTooLong     the prompt, or prompt + max_tokens, does not fit the model or the cache
├── EngineAsleep          the engine has given its memory back, and takes no request until it is woken
├── SleepRefused          the engine cannot be put to sleep as it is now; nothing was changed
├── SleepFailed           falling asleep or waking up came to nothing; the message says why, and it can be tried again
├── QueueFull             too many requests wait; try again after `retry_after` seconds
├── RequestFailed         the engine accepted the request but could not finish it
│   └── EngineDead        the engine core died or makes no progress
├── RankLost              a rank of the group died, hangs or did not come; the message says which
│   ├── PeerLost          a rank missed another one, and cannot know why: that one's core does
│   └── DeviceLost        its device failed, so that no later step would run there
├── EpochFailed           a change of membership came to nothing, and the old one goes on
├── OperationRunning      the group's size is being changed already
├── ConfigError           an engine argument is wrong, `field` names it
└── ModelError            the checkpoint cannot be served
    ├── UnsupportedModel  its architecture or a feature of its config is unknown
    └── WeightError       a tensor is missing, extra or misshapen
"""


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


class QueueFull(StarlingError):
    """The waiting queue is full. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineAsleep(StarlingError):
    """The engine has given its memory back, and takes no request until it is woken."""


class SleepRefused(StarlingError):
    """Requests run, or it is an engine that cannot sleep; nothing was changed."""


class SleepFailed(StarlingError):
    """Falling asleep or waking up came to nothing; what slept before sleeps on, and it can be tried again."""


class RequestFailed(StarlingError):
    """An accepted request ended with an error of the engine, not of the caller."""


class EngineDead(RequestFailed):
    """The engine core process died, or has made no progress for too long."""


class RankLost(StarlingError):
    """A rank of the group died, hangs or did not come, so the others cannot go on; the message says which where it is known."""


class PeerLost(RankLost):
    """A rank missed another one. Its connection tells neither which rank was first to go nor why: that one's core does."""

    @classmethod
    def told_by(cls, last_words: str) -> bool:
        """Whether a process that said this, as `Kind: text`, ended only because another one had."""
        return last_words.startswith(f"{cls.__name__}: ")


class DeviceLost(RankLost):
    """A rank's device failed: no later step would run there."""


class EpochFailed(StarlingError):
    """A change of membership could not be made ready; it was undone, and what served before goes on."""


class OperationRunning(StarlingError):
    """One change of the group's size at a time; the message says what is going on. Nothing was changed."""


class ConfigError(StarlingError):
    """An engine argument is wrong. `field` is its name as the user gave it."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class ModelError(StarlingError):
    """The checkpoint cannot be served."""


class UnsupportedModel(ModelError):
    """The architecture, or a feature that the config asks for, is not known to this engine."""


class WeightError(ModelError):
    """A tensor of the checkpoint is missing, unexpected or has the wrong shape; the message names it."""
