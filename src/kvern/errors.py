"""The exceptions for everything that a user of kvern can cause, as one tree.

  KvernError
  |-- ConfigError        an engine option, environment variable or configuration file is wrong
  |-- ModelNotFound      no such folder, no such repository, or the hub cannot be reached
  |-- UnsupportedModel   the architecture is unknown, or uses something that no family describes
  |-- CorruptCheckpoint  a weight file is truncated, or its tensors do not fit the model
  |-- InvalidAdapter     the files of an adapter do not fit this model
  |-- InvalidWeights     new weights of a served model do not fit it
  |-- InvalidParameter   a sampling parameter is out of range
  |-- InvalidRequest     the prompt is empty, too long, or holds token ids that do not exist
  |   `-- PromptTooLong      it has more tokens than the model's context
  |-- BatchFileError     an input or output file of a batch job cannot be used
  |-- DeadlineExceeded   a request did not end within its timeout
  |-- ServerBusy         the request would have to wait too long for others
  |-- HttpError          an API of the server answers with an error (kvern.api.errors)
  |-- RequestFailed      a request could not go on: its grammar became too expensive, its step failed
  `-- EngineDied         the engine's process has ended
      |-- EngineClosed       because it was told to
      `-- EngineUnavailable  repeatedly, for an unknown reason: try again later

A message is one line: what was wrong, its value, the limit, and what to do. The command line prints it and exits with
code 2; a bad input never shows anything else.
"""

import difflib
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any


def in_a_line(error: BaseException) -> str:
    """Returns the type and message of any error, without line breaks and of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def half_pair(error: UnicodeEncodeError) -> str:
    """Returns the end of a message about text that has no UTF-8 encoding."""
    character = error.object[error.start]
    return f"{character!r}, half of a surrogate pair, which is no character: leave it out, or decode its text as UTF-16"


INTERRUPTED = 130
"""The exit code of a command after Ctrl-C."""


class KvernError(Exception):
    """The base class of all errors that kvern reports about its inputs."""


class ConfigError(KvernError):
    """An engine option is unknown, out of range, or incompatible with another."""


class ModelNotFound(KvernError):
    """The model is neither a folder nor on the hub."""


class UnsupportedModel(KvernError):
    """No registered family describes this architecture or one of its settings."""


class CorruptCheckpoint(KvernError):
    """A weight file is unreadable, or tensors are missing, unexpected or misshapen."""


class InvalidAdapter(KvernError):
    """An adapter's files are missing, unreadable, unsupported, or do not fit the model."""


class InvalidWeights(KvernError):
    """Files of new weights are missing, unreadable, or do not fit the served model."""


class InvalidParameter(KvernError, ValueError):
    """A sampling parameter is out of its range."""


class InvalidRequest(KvernError, ValueError):
    """A prompt cannot be run by this model."""


class PromptTooLong(InvalidRequest):
    """A prompt has `tokens` tokens, and may have `most`."""

    def __init__(self, message: str, tokens: int, most: int) -> None:
        super().__init__(message)
        self.tokens, self.most = tokens, most


class BatchFileError(KvernError):
    """A batch job's input or output file cannot be read or written."""


class DeadlineExceeded(KvernError):
    """A request's `timeout` has passed."""


class RequestFailed(KvernError):
    """A request failed during its answer because of what it asked for; other requests continue.

    `outputs`: the RequestOutputs of the call, of all its requests; the failed ones have a `failure`.
    """

    def __init__(self, message: str, outputs: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class UnreadableContent(RequestFailed):
    """A request failed because content that it brought, such as an image, cannot be read. `MARK` begins the reason."""

    MARK = "its content cannot be read: "


class ServerBusy(KvernError):
    """There is too much work of one kind; the same request may succeed after `seconds`."""

    seconds = 5.0


class EngineDied(KvernError):
    """The engine's process has ended; its running requests are lost."""


class EngineClosed(EngineDied):
    """The engine was told to end; another engine can take its requests."""


class EngineUnavailable(EngineDied):
    """Engines die or do not start, through no fault of a request; the server keeps trying.

    `seconds`: the time after which to try again.
    """

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


def without_passwords(text: str) -> str:
    """Returns a text for messages and logs, without the password of a URL such as valkey://user:password@host."""
    return re.sub(r"(//[^:@/\s]*):\S*@", r"\1:***@", text)


class _Shown(reprlib.Repr):
    """A repr that reads only the first items: a list of a million costs as much as one of ten."""

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


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the question whether a similar one was meant, or nothing."""
    near = difflib.get_close_matches(str(name), sorted(known), n=1)
    return f": did you mean {near[0]}?" if near else ""


def shown(value: object) -> str:
    """Returns the beginning of a value's representation for a message; cheap for values of any size and depth."""
    return _shown.repr(value)[:SHOWN_CHARACTERS]
