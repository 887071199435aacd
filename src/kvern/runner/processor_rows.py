"""Custom logits processors at work: which rows have them, and what happens if one fails."""

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from kvern.device.rows import BatchRows
from kvern.device.transfer import fetch, upload
from kvern.errors import ConfigError, in_a_line
from kvern.request.step import Fork, NewRequest
from kvern.sample.processors import (
    LogitsProcessor,
    ProcessedRequest,
    ProcessedRows,
    ProcessorModel,
    Processors,
    arguments,
)

logger = logging.getLogger("kvern")

LARGEST = 1e30
"""Logits are cut off there: divided by any temperature they stay finite."""


@dataclass
class ProcessorVerdict:
    """Rows whose processors failed, and those of `rows` [N] that `unusable` [N] bool marks, once it is known."""

    failed: dict[int, str] = field(default_factory=dict)
    rows: Sequence[int] = ()
    names: Sequence[str] = ()
    """The names of the processors of each of `rows`."""
    unusable: torch.Tensor | None = None

    def reasons(self) -> dict[int, str]:
        """Returns why rows fail, by row. It waits for the device."""
        if self.unusable is None:
            return self.failed
        marked = zip(self.rows, self.names, self.unusable.tolist(), strict=True)
        said = {row: f"{names} left no token that could be sampled" for row, names, bad in marked if bad}
        return said | self.failed


class ProcessorRows:
    """The processors of an engine. Raises ConfigError if one cannot be made."""

    def __init__(self, processors: Processors, model: ProcessorModel) -> None:
        self._kinds = processors
        self._processors: dict[str, LogitsProcessor] = {}
        for name, kind in processors.items():
            try:
                self._processors[name] = kind(model)
            except Exception as error:  # the package's own
                raise ConfigError(f"logits processor {name!r} cannot start: {in_a_line(error)}") from error
        self._members: dict[int, list[str]] = {}
        self._failed: dict[int, str] = {}

    def join(self, joined: Iterable[NewRequest]) -> None:
        """Let requests take their rows."""
        for request in joined:
            self._members.pop(request.slot, None)
            self._failed.pop(request.slot, None)
            asked = request.params.logits_processors
            if asked and self._processors:
                self._members[request.slot] = [name for name in self._processors if name in asked]
                for name in self._members[request.slot]:
                    try:
                        values = arguments(self._kinds[name], asked[name])
                        taken = ProcessedRequest(values, tuple(request.token_ids), request.spec.prompt_length)
                        self._processors[name].join(request.slot, taken)
                    except Exception as error:  # the package's own
                        self._failed[request.slot] = _failure(name, error)

    def fork(self, forked: Sequence[Fork], rows: BatchRows) -> None:
        """Let rows that went on behind others take their slots, with the tokens that `rows` now have."""
        for fork in forked if self._processors else ():
            if fork.slot != fork.source:
                request, token_ids = rows.request(fork.slot), []
                if request.params.logits_processors:  # a device is waited for
                    token_ids = rows.tokens[fork.slot, : fork.length + 1].tolist()
                self.join([dataclasses.replace(request, slot=fork.slot, token_ids=token_ids)])

    def apply(
        self, logits: torch.Tensor, tokens: torch.Tensor, slots: Sequence[int], positions: Sequence[int]
    ) -> ProcessorVerdict | None:
        """Change `logits` [N, vocabulary] float32 in place where rows have processors; None if none has.

        Rows of one slot stand one behind the other, with drafts of `tokens` between them. Each processor works on a
        copy of its rows, so that one that fails leaves all others, and its own rows, as they were.
        """
        members = [row for row, slot in enumerate(slots) if slot in self._members] if self._members else []
        if not members:
            return None
        failed = {row: self._failed[slots[row]] for row in members if slots[row] in self._failed}
        for name in self._processors:
            rows = [row for row in members if name in self._members[slots[row]] and row not in failed]
            if rows:
                failed |= self._run(name, logits, tokens, rows, slots, positions)
        index = upload(members, torch.int64, logits.device)
        scores = logits.index_select(0, index)
        unusable = scores.isnan().any(-1) | scores.isneginf().all(-1)
        scores.nan_to_num_(nan=0.0, posinf=LARGEST, neginf=float("-inf")).clamp_(max=LARGEST)
        logits.index_copy_(0, index, scores.masked_fill_(unusable[:, None], 0.0))
        names = ["logits processor " + ", ".join(self._members[slots[row]]) for row in members]
        return ProcessorVerdict(failed, members, names, fetch(unusable))

    def _run(
        self,
        name: str,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        rows: list[int],
        slots: Sequence[int],
        positions: Sequence[int],
    ) -> dict[int, str]:
        """Let one processor change its rows; if it fails, each alone, to find out whose fault it is."""
        its_slots, its_positions = [slots[row] for row in rows], [positions[row] for row in rows]
        sent = upload(rows + its_slots + its_positions, torch.int64, logits.device).view(3, -1)
        index, device_slots, device_positions = sent
        scores = logits.index_select(0, index)
        try:
            self._processors[name].apply(
                scores, ProcessedRows(its_slots, its_positions, device_slots, device_positions, tokens)
            )
        except Exception as error:  # the package's own
            if len(rows) == 1:
                return {rows[0]: _failure(name, error)}
            alone = [self._run(name, logits, tokens, [row], slots, positions) for row in rows]
            return {row: reason for failed in alone for row, reason in failed.items()}
        logits.index_copy_(0, index, scores)
        return {}


def _failure(name: str, error: Exception) -> str:
    logger.warning("logits processor %r failed", name, exc_info=error)
    return f"logits processor {name} failed: {in_a_line(error)}"
