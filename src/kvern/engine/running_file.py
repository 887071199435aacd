"""A file with the requests that an engine's process computes, which the server reads after its death."""

import os
from pathlib import Path

import msgspec

LENGTH_BYTES = 8
"""Before the list, its length: an earlier, longer list may stand behind it."""


class RunningFile:
    """Written before each step that computes others than the step before; what is written survives the process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        self._written: list[str] = []

    def write(self, request_ids: list[str]) -> None:
        """These are computed from now on, and those of the call before may be still."""
        if request_ids == self._written:
            return
        content = msgspec.msgpack.encode([*request_ids, *set(self._written).difference(request_ids)])
        self._written = list(request_ids)
        os.pwrite(self._descriptor, len(content).to_bytes(LENGTH_BYTES, "little") + content, 0)


def read_running(content: bytes) -> list[str]:
    """The requests that ran at the end, those of the last step first."""
    try:
        end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
        return msgspec.msgpack.decode(content[LENGTH_BYTES:end], type=list[str])
    except msgspec.DecodeError:
        return []
