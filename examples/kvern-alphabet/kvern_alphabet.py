"""A logits processor for kvern: answers keep to the characters that a request names.

pip install ./kvern-alphabet
kvern serve --logits-processors alphabet
curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \
  -d '{"prompt": "2 + 2 =", "logits_processors": {"alphabet": {"characters": " 0123456789"}}}'
"""

import msgspec
import torch

from kvern.sample.processors import ProcessedRequest, ProcessedRows, ProcessorModel


class Arguments(msgspec.Struct, forbid_unknown_fields=True):
    """What requests may say."""

    characters: str
    """All that an answer may be written with."""

    def __post_init__(self) -> None:
        if not self.characters:
            raise ValueError("characters is empty: name at least one")


class Alphabet:
    """Bans every token with another character; what ends an answer is always allowed."""

    Arguments = Arguments

    def __init__(self, model: ProcessorModel) -> None:
        tokenizer = model.tokenizer
        self._texts = {
            token: set(tokenizer.id_to_token(token))
            for token in range(min(model.vocab_size, tokenizer.vocab_size))
            if tokenizer.id_to_token(token) and not tokenizer.is_special(token)
        }
        self._ends = list(tokenizer.eos_token_ids)
        self._banned = torch.zeros(model.slots, model.vocab_size, dtype=torch.bool, device=model.device)

    def join(self, slot: int, request: ProcessedRequest) -> None:
        """The row of the table that the slot has is written once; nothing is sent to the device afterwards."""
        wanted = set(request.arguments.characters)
        allowed = [token for token, text in self._texts.items() if text <= wanted]
        row = torch.ones(self._banned.shape[1], dtype=torch.bool)
        row[allowed + self._ends] = False
        self._banned[slot] = row.to(self._banned.device)

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> None:
        """All requests of the step at once."""
        logits.masked_fill_(self._banned[rows.device_slots], float("-inf"))
