"""The routes of all APIs, and their handlers, each of which is imported and made with its first request."""

import asyncio
import contextlib
import re
from collections.abc import Collection
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvern.server.config import BATCHES
from kvern.server.operations import read_operations
from kvern.server.service import Service

if TYPE_CHECKING:
    from kvern.server.stores.database import DataFolder
    from kvern.server.stores.files import Store
    from kvern.server.stores.responses import ResponseStore

HANDLERS = "kvern.server.handlers"
T = TypeVar("T")


class Apis:
    """The handlers of all APIs, and what they share. `width` is how many requests of batches run at once."""

    def __init__(self, service: Service, width: int) -> None:
        self.service, self.width = service, width
        service.stored_files = lambda: self.store
        if service.config.allowed_media_domains:
            import_module("kvern.images.addresses")  # with the first address it would hold up the event loop
        self.tasks: set[asyncio.Task[None]] = set()
        """Background tasks that the server's shutdown waits for."""
        self._made: dict[type[Any], Any] = {}
        self._imported: set[str] = set()

    def get(self, kind: type[T]) -> T:
        """The handler of a class."""
        if kind not in self._made:
            make: Any = getattr(kind, "for_server", kind)
            self._made[kind] = make(self)
        handler: T = self._made[kind]
        return handler

    def routes(self, without: Collection[str] = ()) -> list[Route]:
        """The routes of all APIs, except those of the handlers `without`, each a module and a class."""
        handlers = ((route, operation.handler) for route, operation in read_operations().operations.items())
        return [
            self._route(route, handler)
            for route, handler in handlers
            if handler and handler.partition(".")[0] not in without
        ]

    async def resume(self) -> None:
        """Continues the batches that an earlier server process left unfinished."""
        if self._has_batches():
            await self._named("batches", "Batches").resume()

    def keys_changed(self) -> None:
        """Lets batches of keys that are gone rest, and those of keys that came go on."""
        task = asyncio.create_task(self._change_keys())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _has_batches(self) -> bool:
        """True if there may be batches on disk. A folder that cannot be read has none."""
        with contextlib.suppress(OSError):
            return (self.service.config.data_folder / BATCHES).exists()
        return False

    async def _change_keys(self) -> None:
        if self._has_batches():
            await self._named("batches", "Batches").change_keys(self.service.keys.users)

    async def stop(self) -> None:
        """Ends background work and releases the folder."""
        for handler in self._made.values():
            if hasattr(handler, "stop"):
                await handler.stop()
        if "kept" in self.__dict__:
            await self.kept.stop()
        if "store" in self.__dict__:
            self.store.close()
        if "_folder" in self.__dict__:
            self._folder.leave()

    @cached_property
    def _folder(self) -> "DataFolder":
        from kvern.server.stores.database import DataFolder

        return DataFolder(self.service.config.data_folder, self.service.config.disk_reserve)

    @cached_property
    def store(self) -> "Store":
        """Files and batches."""
        from kvern.server.stores.files import Store

        return Store(self._folder, self.service.config.disk_per_key)

    @cached_property
    def kept(self) -> "ResponseStore":
        """Responses and conversations."""
        from kvern.server.stores.responses import ResponseStore

        return ResponseStore(self._folder, len(self.service.keys.users), self.service.config.disk_per_key)

    def _named(self, module: str, kind: str) -> Any:
        """The handler of a class in a module of `kvern.server.handlers`."""
        return self.get(getattr(import_module(f"{HANDLERS}.{module}"), kind))

    def _route(self, route: str, handler: str) -> Route:
        method, path = route.split(" ")
        module, kind, verb = re.split("[:.]", handler)

        async def answer(request: Request) -> Response:
            if module not in self._imported:  # an import takes too long for the event loop
                await asyncio.to_thread(import_module, f"{HANDLERS}.{module}")
                self._imported.add(module)
            response: Response = await getattr(self._named(module, kind), verb)(request)
            return response

        return Route(path, answer, methods=[method])
