"""Registries of parts by name: kvern's own, those that a decorator registers, and entry points of other packages."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from kvern.errors import ConfigError

Part = TypeVar("Part")


def imported(where: str) -> Any:
    """The object that `module:object` names; its module is imported when this is called first."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


class Plugins(Generic[Part]):
    """The parts of one kind, `what`, by name.

    `own` has kvern's parts as `module:object`; `group` is the group of other packages' entry points. A module is
    imported when one of its parts is used.
    """

    def __init__(self, what: str, group: str, own: Mapping[str, str] | None = None) -> None:
        self.what = what
        self.group = group
        self._own = own or {}
        self._registered: dict[str, Part] = {}

    def register(self, name: str) -> Callable[[Part], Part]:
        """Registers the decorated object under a name. Raises ConfigError if another object has it."""

        def register(part: Part) -> Part:
            holder = self._own[name].partition(":")[0] if name in self._own else None
            if self._registered.setdefault(name, part) is not part:
                holder = self._registered[name].__module__
            if holder is not None:
                raise ConfigError(f"{self.what} {name!r} is registered already, by {holder}")
            return part

        return register

    @property
    def names(self) -> list[str]:
        """All names, sorted. Nothing is imported."""
        return sorted({*self._own, *self._registered, *(entry.name for entry in entry_points(group=self.group))})

    def get(self, name: str) -> Part | None:
        """Returns the part of this name, or None."""
        if name in self._registered:
            return self._registered[name]
        if name in self._own:
            return self._registered.setdefault(name, imported(self._own[name]))
        for entry in entry_points(group=self.group, name=name):
            self._registered.setdefault(name, entry.load())
        return self._registered.get(name)

    def find(self, name: str) -> Part:
        """Returns the part of this name. Raises ConfigError if there is none, or its package cannot be imported."""
        try:
            part = self.get(name)
        except Exception as error:  # a module may raise anything when it is imported
            raise ConfigError(f"{self.what} {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
        if part is None:
            raise ConfigError(
                f"there is no {self.what} {name!r}: installed are {', '.join(self.names) or 'none'}; a package "
                f"provides them as entry points of group {self.group!r}"
            )
        return part
