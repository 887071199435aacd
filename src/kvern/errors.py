"""Everything that a user of kvern can cause to go wrong, as one tree of exceptions.

    KvernError
    |-- ConfigError        an engine option, environment variable or configuration file is wrong
    |-- ModelNotFound      no such folder, no such repository, or the hub cannot be reached
    |-- UnsupportedModel   the architecture is unknown, or uses something that no family describes
    |-- CorruptCheckpoint  a weight file is truncated, or its tensors do not fit the model
    |-- InvalidAdapter     the files of an adapter are not those of one that this model can use
    |-- InvalidParameter   a sampling parameter is out of range
    |-- InvalidRequest     the prompt is empty, too long, or holds token ids that do not exist
    |-- BatchFileError     an input or output file of a batch job cannot be used
    |-- DeadlineExceeded   a request did not end within the time that it was given
    |-- RequestFailed      a request could not go on: its grammar became too expensive, its logits processor failed
    `-- EngineDied         the process that computes has ended
        `-- EngineClosed   because it was told to

A message is one line: what was wrong, its value, the limit, and what to do. The command line prints it and exits with
code 2; nothing else about a bad input is ever shown.
"""


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


class BatchFileError(KvernError):
    """A batch job's input or output file cannot be read or written."""


class DeadlineExceeded(KvernError):
    """A request's `timeout` has passed."""


class RequestFailed(KvernError):
    """A request ended in the middle of its answer, through what it asked for; others go on."""


class EngineDied(KvernError):
    """The engine's process has ended; what ran there is lost."""


class EngineClosed(EngineDied):
    """The engine was told to end; what it has not done is for another."""
