"""Prompts with images: each placeholder becomes the tokens of its image."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvern.errors import InvalidRequest, UnsupportedModel
from kvern.images.file import ImageFile, read_file
from kvern.images.limits import MOST_IMAGES
from kvern.images.parts import bytes_of
from kvern.images.settings import ImageSettings, settings_of
from kvern.images.spans import LEAST_PLACES, places_for
from kvern.request.request import PromptInput
from kvern.request.spans import Spans
from kvern.spec.vision import VisionSpec
from kvern.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ImageReader:
    """The images of one model's prompts. `encode` makes tokens of the texts among those of an image."""

    settings: ImageSettings
    spec: VisionSpec
    encode: Callable[[str], Sequence[int]]

    @property
    def mark(self) -> str:
        """The text that a chat template writes for an image."""
        return self.spec.tokens.mark or self.spec.tokens.image

    @property
    def marks(self) -> Sequence[str]:
        """The texts of clients that must not become an image's tokens."""
        return tuple({self.mark, self.spec.tokens.image})

    def placed(self, text: str) -> str:
        """Returns what a template wrote with one token for each image at its place."""
        tokens = self.spec.tokens
        return text.replace(tokens.mark, tokens.placed) if tokens.mark else text

    @classmethod
    def of(cls, folder: Path, spec: VisionSpec, tokenizer: Tokenizer) -> "ImageReader":
        """Returns the reader for the model in a folder. Raises UnsupportedModel."""
        settings = settings_of(folder, spec)
        names = (spec.tokens.image, *spec.tokens.special)
        ids = [tokenizer.token_to_id(name) for name in names]
        if ids[0] != spec.image_id or None in ids:
            raise UnsupportedModel(f"the tokenizer of {folder} lacks a token of images, {', '.join(names)}")
        return cls(settings, spec, functools.cache(lambda text: tokenizer.encode(text, add_special_tokens=False)))

    def checked(self, prompt: PromptInput) -> PromptInput:
        """Returns a prompt whose blocks are named by its images too, whoever made it.

        Raises InvalidRequest if its tokens do not fit its images.
        """
        files = [read_file(data, f"attachment {number}") for number, data in enumerate(prompt.attachments)]
        for number, file in enumerate(files):
            rows = self.settings.count(file)
            if rows > LEAST_PLACES and rows > (most := places_for(self.settings)):
                raise InvalidRequest(
                    f"attachment {number}: the image of {file.width} x {file.height} pixels has {rows} tokens: at most "
                    f"{most} are read; make it smaller"
                )
        firsts = [0, *itertools.accumulate(self.settings.count(file) for file in files)]
        found = prompt.token_ids.count(self.spec.image_id)
        if found != firsts[-1]:
            raise InvalidRequest(
                f"the prompt has {found} times the token {self.spec.tokens.image}, and its {len(files)} images have "
                f"{firsts[-1]}: send a conversation"
            )
        if not files:
            return prompt
        places = [place for place, token in enumerate(prompt.token_ids) if token == self.spec.image_id]
        keys = {
            places[first]: file.digest + self.settings.digest for first, file in zip(firsts[:-1], files, strict=True)
        }
        turn = (0, 0)
        if self.spec.axes:  # an image counts as many positions as its longer side
            turn = places[-1] + 1, sum(max(grid) - grid.cells for grid in map(self.settings.tokens, files))
        block_keys = tuple(sorted({**dict(prompt.block_keys), **keys}.items()))
        spans = self._spans(prompt.token_ids)
        return msgspec.structs.replace(prompt, block_keys=block_keys, turn=turn, spans=spans)

    def _spans(self, token_ids: Sequence[int]) -> Spans:
        """The tokens of images that see each other."""
        found: list[tuple[int, int]] = []
        first = 0
        for is_image, group in itertools.groupby(token_ids, self.spec.image_id.__eq__):
            end = first + sum(1 for _ in group)
            found += [(first, end)] if is_image and self.spec.spans else []
            first = end
        return tuple(found)

    def read(self, part: Mapping[str, Any], place: str) -> ImageFile:
        """Returns the image in a part of a message. Raises InvalidRequest."""
        return read_file(bytes_of(part, place), place)

    def tokens(self, file: ImageFile) -> list[int]:
        """Returns the tokens that stand for an image."""
        found: list[int] = []
        for is_text, group in itertools.groupby(self.settings.written(file, self.spec.tokens), _is_text):
            parts = list(group)
            found += self.encode("".join(map(str, parts))) if is_text else [self.spec.image_id] * sum(map(int, parts))
        return found

    def prompt(self, token_ids: Sequence[int], files: Sequence[ImageFile]) -> PromptInput:
        """Returns a prompt in which the images stand at their placeholders. Raises InvalidRequest."""
        if len(files) > MOST_IMAGES:
            raise InvalidRequest(f"the conversation has {len(files)} images: at most {MOST_IMAGES} are read")
        places = [place for place, token in enumerate(token_ids) if token == self.spec.image_id]
        if len(places) != len(files):
            raise InvalidRequest(f"the prompt has {len(places)} times {self.mark} for {len(files)} images")
        found: list[int] = []
        begin = 0
        for place, file in zip(places, files, strict=True):
            found += [*token_ids[begin:place], *self.tokens(file)]
            begin = place + 1
        return PromptInput([*found, *token_ids[begin:]], tuple(file.data for file in files))


def _is_text(part: str | int) -> bool:
    return isinstance(part, str)
