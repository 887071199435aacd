"""Parts that are added by name: by a module of kvern, by a decorator, or by an entry point of another package."""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Generic, TypeVar

from kvern.errors import ConfigError

Part = TypeVar("Part")


class Plugins(Generic[Part]):
    """The parts of one kind, `what`, by name. `own`: kvern's modules that register some, imported at the first use.

    Of a package all its modules are. `group` is the entry points' group in which other packages name theirs, which are
    imported only when one is asked for.
    """

    def __init__(self, what: str, group: str, own: Sequence[str] = ()) -> None:
        self.what, self.group, self._own = what, group, own
        self._registered: dict[str, Part] = {}

    def register(self, name: str) -> Callable[[Part], Part]:
        """Register the decorated object under a name. Raises ConfigError if another holds it."""

        def register(part: Part) -> Part:
            if self._registered.setdefault(name, part) is not part:
                raise ConfigError(f"{self.what} {name!r} is registered already, by {self._registered[name].__module__}")
            return part

        return register

    @property
    def names(self) -> list[str]:
        """All that can be had, in order; those of entry points are not imported."""
        self._import_own()
        return sorted({*self._registered, *(entry.name for entry in entry_points(group=self.group))})

    def get(self, name: str) -> Part | None:
        """The part of this name, or None."""
        self._import_own()
        if name not in self._registered:
            for entry in entry_points(group=self.group, name=name):
                self._registered.setdefault(name, entry.load())
        return self._registered.get(name)

    def find(self, name: str) -> Part:
        """The part of this name. Raises ConfigError if there is none, or its package cannot be imported."""
        try:
            part = self.get(name)
        except Exception as error:  # whatever a module raises when it is imported
            raise ConfigError(f"{self.what} {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
        if part is None:
            raise ConfigError(
                f"there is no {self.what} {name!r}: installed are {', '.join(self.names) or 'none'}; a package "
                f"provides them as entry points of group {self.group!r}"
            )
        return part

    def _import_own(self) -> None:
        for name in self._own:
            for module in iter_modules(getattr(import_module(name), "__path__", ())):
                import_module(f"{name}.{module.name}")
        self._own = ()  # only now: another thread that asks meanwhile has to wait for the imports, too
