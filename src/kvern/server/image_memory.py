"""The memory that images of requests take."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

from kvern.api.errors import HttpError
from kvern.server.config import LARGEST_IMAGES
from kvern.server.keys import ApiKey, KeyRing


class ImageMemory:
    """The bytes of images of all requests that have not ended, as they were sent.

    A key may have its share, or one request of `LARGEST_IMAGES` bytes.
    """

    def __init__(self, most: int, keys: KeyRing) -> None:
        self._most = most
        self._keys = keys
        self._taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def held(self, key: ApiKey, size: int, refuse: Callable[[str], HttpError]) -> Iterator[None]:
        """Counts a request's images until the block ends. Raises HttpError, or that of `refuse`."""
        if size > LARGEST_IMAGES:
            message = f"the images have {size} bytes: one request may have {LARGEST_IMAGES}; make them smaller"
            raise HttpError(400, message)
        share = max(LARGEST_IMAGES, self._most // max(len(self._keys.users), 1))
        if size and (self._taken[key.line] + size > share or self._taken.total() + size > self._most):
            raise refuse("the images of requests that wait or run fill the memory for them")
        self._taken[key.line] += size
        try:
            yield
        finally:
            self._taken[key.line] -= size
            if not self._taken[key.line]:
                del self._taken[key.line]
