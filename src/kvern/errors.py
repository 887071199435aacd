"""Everything that a user of kvern can cause to go wrong, as one tree of exceptions.

    KvernError
    |-- ConfigError        an engine option, environment variable or configuration file is wrong
    |-- ModelNotFound      no such folder, no such repository, or the hub cannot be reached
    |-- UnsupportedModel   the architecture is unknown, or uses something that no family describes
    |-- CorruptCheckpoint  a weight file is truncated, or its tensors do not fit the model
    |-- InvalidAdapter     the files of an adapter are not those of one that this model can use
    |-- InvalidParameter   a sampling parameter is out of range
    |-- InvalidRequest     the prompt is empty, too long, or holds token ids that do not exist
    |   `-- PromptTooLong      it has more tokens than the model's context
    |-- BatchFileError     an input or output file of a batch job cannot be used
    |-- DeadlineExceeded   a request did not end within the time that it was given
    |-- ServerBusy         what is asked has to wait for too long, because of others
    |-- HttpError          an API of the server answers with an error (kvern.api.errors)
    |-- RequestFailed      a request could not go on: its grammar became too expensive, its step failed
    `-- EngineDied         the process that computes has ended
        |-- EngineClosed       because it was told to
        `-- EngineUnavailable  again and again, for no reason that is known: come back later

A message is one line: what was wrong, its value, the limit, and what to do. The command line prints it and exits with
code 2; nothing else about a bad input is ever shown.
"""

import reprlib
from collections.abc import Sequence
from typing import Any


def in_a_line(error: BaseException) -> str:
    """What an error of any kind says, and its type, without line breaks and of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def half_pair(error: UnicodeEncodeError) -> str:
    """What text that UTF-8 has no bytes for holds, as the end of a message."""
    character = error.object[error.start]
    return f"{character!r}, half of a surrogate pair, which is no character: leave it out, or decode its text as UTF-16"


class KvernError(Exception):
    """The root: catch this to catch everything that kvern reports about its inputs."""


class ConfigError(KvernError):
    """An engine option is unknown, out of range, or incompatible with another."""


class ModelNotFound(KvernError):
    """The model is neither a folder nor something the hub delivers."""


class UnsupportedModel(KvernError):
    """No registered family describes this architecture or one of its settings."""


class CorruptCheckpoint(KvernError):
    """A weight file is unreadable, or tensors are missing, unexpected or misshapen."""


class InvalidAdapter(KvernError):
    """An adapter's files are missing or unreadable, do not fit the model, or ask for what kvern does not do."""


class InvalidParameter(KvernError, ValueError):
    """A sampling parameter is out of its range."""


class InvalidRequest(KvernError, ValueError):
    """A prompt cannot be run by this model."""


class PromptTooLong(InvalidRequest):
    """A prompt has `tokens`, and may have `most`."""

    def __init__(self, message: str, tokens: int, most: int) -> None:
        super().__init__(message)
        self.tokens, self.most = tokens, most


class BatchFileError(KvernError):
    """A batch job's input or output file cannot be read or written."""


class DeadlineExceeded(KvernError):
    """A request's `timeout` has passed."""


class RequestFailed(KvernError):
    """A request ended in the middle of its answer, through what it asked for; others go on.

    `outputs`: the RequestOutputs of the call, those of the others, too; the ones that failed have a `failure`.
    """

    def __init__(self, message: str, outputs: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class ServerBusy(KvernError):
    """There is too much of one kind to do: the same request may be served in `seconds`."""

    seconds = 5.0


class EngineDied(KvernError):
    """The engine's process has ended; what ran there is lost."""


class EngineClosed(EngineDied):
    """The engine was told to end: what it has not done is for another one."""


class EngineUnavailable(EngineDied):
    """Engines do not stay alive, or do not start, and no request is to blame; they are tried again and again.

    `seconds`: when it is worth asking again.
    """

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class _Shown(reprlib.Repr):
    """Looks at the first few things only: a list of a million costs as much as one of ten."""

    maxlist = maxtuple = maxset = maxdict = 8
    maxlevel = 4

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[:SHOWN_CHARACTERS])

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[:SHOWN_CHARACTERS])

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 192 else f"a whole number of {x.bit_length()} bits"


SHOWN_CHARACTERS = 60
_shown = _Shown()


def shown(value: object) -> str:
    """A value in a message: the beginning of its representation, of whatever size or depth it is."""
    return _shown.repr(value)[:SHOWN_CHARACTERS]
