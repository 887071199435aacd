"""Prompts of one family with the tokens and log-probabilities that transformers computes for them."""

import random
from pathlib import Path

import torch

from kvern import RequestOutput
from tests.support.families import WINDOW, reference_logits

BLOCK = 4
CHUNK = 7
OUTPUT = 8
TOLERANCE = 1e-4
SHARED = 5 * BLOCK + 1
LENGTHS = (1, BLOCK, SHARED + BLOCK, SHARED + WINDOW, SHARED + 2 * CHUNK + 2)
"""Prompts within a block, at its end, over several, over the window, and over several chunks."""


class Reference:
    """The answers of transformers to the prompts of one family."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rng = random.Random(3)
        head = [rng.randrange(3, 131) for _ in range(SHARED)]
        self.prompts = [
            [rng.randrange(3, 131) for _ in range(length)]
            if length < SHARED
            else head + [rng.randrange(3, 131) for _ in range(length - SHARED)]
            for length in LENGTHS
        ]
        self.outputs, self.logprobs = [], []
        for prompt in self.prompts:
            tokens = list(prompt)
            for _ in range(OUTPUT):
                logits = reference_logits(folder, tokens)
                tokens.append(int(logits[-1].argmax()))
            self.outputs.append(tokens[len(prompt) :])
            self.logprobs.append(logits.log_softmax(-1))  # row i predicts token i + 1


def check_outputs(outputs: list[RequestOutput], reference: Reference) -> None:
    """Same tokens, and log-probabilities (logits up to a constant for each row) within the tolerance."""
    for output, tokens, logprobs in zip(outputs, reference.outputs, reference.logprobs, strict=True):
        [answer] = output.outputs
        assert answer.token_ids == tokens
        assert answer.logprobs is not None
        for position, entry in enumerate(answer.logprobs):
            expected = logprobs[len(output.prompt_token_ids) - 1 + position]
            ids = torch.tensor(list(entry))
            actual = torch.tensor([value.logprob for value in entry.values()])
            torch.testing.assert_close(actual, expected[ids], atol=TOLERANCE, rtol=0)
