"""Images that are embedded by themselves, in no prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvern.errors import InvalidRequest
from kvern.images.file import ImageFile, read_file
from kvern.images.parts import bytes_of
from kvern.images.settings import ImageSettings, settings_of
from kvern.request.request import PromptInput
from kvern.spec.vision import VisionSpec


@dataclass(frozen=True)
class PictureReader:
    """Makes prompts of images: one attachment, and a token 0 for each patch."""

    settings: ImageSettings

    @classmethod
    def of(cls, folder: Path, spec: VisionSpec) -> "PictureReader":
        """Returns the reader for the model in a folder. Raises UnsupportedModel."""
        return cls(settings_of(folder, spec))

    def prompt(self, part: Mapping[str, Any], place: str) -> PromptInput:
        """Returns the prompt of the image in a part of a message. Raises InvalidRequest."""
        return self._prompt(read_file(bytes_of(part, place), place))

    def checked(self, prompt: PromptInput) -> PromptInput:
        """Returns a prompt as it must be, whoever made it. Raises InvalidRequest."""
        if len(prompt.attachments) != 1:
            raise InvalidRequest(f"the prompt has {len(prompt.attachments)} images: an embedding is of one")
        return self._prompt(read_file(prompt.attachments[0], "the image"))

    def _prompt(self, file: ImageFile) -> PromptInput:
        return PromptInput([0] * self.settings.count(file), (file.data,))
