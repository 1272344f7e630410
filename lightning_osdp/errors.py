"""Every error that lightning_osdp raises on purpose.

OSDPError
├── ConfigurationError (ValueError)   an argument that can't be used: an unreadable limit, SWA, a precision
│   └── PlanMismatchError             a plan for another model, another number of ranks, or another version
├── InfeasibleError (ValueError)      nothing fits under the memory limit
├── OutOfMemoryError (RuntimeError)   a rank ran out of memory while it trained: says what to set next
├── TraceError (RuntimeError)         the module's training_step can't be read on fake tensors
├── ShardingError (RuntimeError)      a plan can't be applied, or a sharded module is used in a way that can't be right
├── RecoverableError                  a trial failed: planning goes on without it
└── CheckpointError (RuntimeError)    a checkpoint can't be written, or is damaged, foreign, or of another model

Warnings: OSDPWarning (UserWarning).
"""

from __future__ import annotations

MAX_MESSAGE = 20_000
"""Characters of a message that other ranks are told: some libraries quote whole files."""


class OSDPError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(OSDPError, ValueError):
    """An argument or a combination of settings that can't be used."""


class PlanMismatchError(ConfigurationError):
    """A plan that was made for another model, number of ranks, or version of the plan format."""


class RecoverableError(OSDPError):
    """An error after which ranks may go on together, if all had it or none waits for another one."""


class InfeasibleError(OSDPError, ValueError):
    """No choice of modes fits the memory limit.

    Attributes:
        needed_bytes: smallest peak of any choice.
        budget_bytes: the memory limit.
        largest: index of the operator whose smallest option is the largest, -1 if there is none.
    """

    def __init__(self, message: str, *, needed_bytes: int, budget_bytes: int, largest: int = -1) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.largest = largest

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_infeasible, (str(self), self.needed_bytes, self.budget_bytes, self.largest))


class OutOfMemoryError(OSDPError, RuntimeError):
    """A rank ran out of memory under a plan; the allocator's own error is its cause."""


class TraceError(OSDPError, RuntimeError):
    """The training step can't be traced on fake tensors."""


class ShardingError(OSDPError, RuntimeError):
    """A plan can't be applied to this module, or a sharded module is used in a way that can't be right."""


class CheckpointError(OSDPError, RuntimeError):
    """A checkpoint that can't be written, or that is damaged, foreign, or of another model."""


class OSDPWarning(UserWarning):
    """Something works, but not as well as it could."""


def check_kind(name: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Refuse a value of another kind than an argument takes.

    Args:
        name: the argument, as the user writes it.
        value: what was given.
        kinds: the classes that it may have.
        wanted: what the argument takes, in words.

    Raises:
        ConfigurationError: names the argument, what it got and what it takes.
    """
    if not isinstance(value, kinds):
        raise ConfigurationError(f"{name} takes {wanted}, not {type(value).__name__}: {value!r:.80}")


def _rebuild_infeasible(message: str, needed_bytes: int, budget_bytes: int, largest: int) -> InfeasibleError:
    return InfeasibleError(message, needed_bytes=needed_bytes, budget_bytes=budget_bytes, largest=largest)


def message_of(error: BaseException) -> str:
    """Return an error's message, whatever its class does: raise in ``__str__``, or quote bytes that are no text."""
    try:
        text = str(error)
    except Exception as failure:  # the user's class may raise anything
        return f"its message can't be read, {type(failure).__name__} is raised"
    if len(text) > MAX_MESSAGE:
        text = f"{text[:MAX_MESSAGE]}..."
    return text.encode(errors="backslashreplace").decode()


def format_error(error: BaseException) -> str:
    """Return the name of an error's class and its message, as ``ValueError: no such column``."""
    return f"{type(error).__name__}: {message_of(error)}"
