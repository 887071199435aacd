"""Changes to Triton (3.6) when kernels are defined, so that a start finds and defines them sooner, that threads which
do so at once get their own, and that what is not specialised may be fields of a tuple.

Imported before kernels are. Other versions that work otherwise are left as they are.
"""

import inspect
import linecache
import threading
from types import FunctionType, SimpleNamespace
from typing import Any

from triton.runtime import build, jit

_load = getattr(build, "_load_module_from_path", None)
_loading = threading.Lock()


def _load_alone(name: str, path: str) -> Any:
    """Returns the contents of a compiled module.

    All launchers are C modules of one name. Loading one again overwrites the functions of the one that was loaded
    last, which another thread may be using: so each is loaded under a lock, and gets a copy of its functions.
    """
    with _loading:
        assert _load is not None
        return SimpleNamespace(**vars(_load(name, path)))


_update_hash = jit.DependenciesFinder._update_hash


def _hash_called_first(finder: Any, called: Any) -> None:
    """Hash a called function before its caller, whose key in Triton's cache lists the constants that both read.

    Otherwise the key depends on what was hashed before in this process or thread, and another one, which computes
    another key, compiles the kernel again.
    """
    called.cache_key  # noqa: B018 (makes it)
    _update_hash(finder, called)


_specialize = getattr(jit, "native_specialize_impl", None)


def _specialize_fields(backend: Any, value: Any, constant: bool, specialize: bool, align: bool) -> tuple[Any, Any]:
    """Returns the type of an argument, and what more of it a kernel is compiled for.

    Triton keeps to `do_not_specialize` and `do_not_specialize_on_alignment` for arguments, but not for the fields of
    one that is a tuple.
    """
    assert _specialize is not None
    if not isinstance(value, tuple) or (specialize and align):
        result: tuple[Any, Any] = _specialize(backend, value, constant, specialize, align)
        return result
    fields = [_specialize_fields(backend, field, constant, specialize, align) for field in value]
    make = getattr(type(value), "_make", tuple)
    return make(kind for kind, _ in fields), make(more for _, more in fields)


class _Inspect:
    """`inspect` as Triton uses it, which tokenizes a function to find its end: 1 to 2 ms for each of 150."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getsourcelines(self, function: FunctionType) -> tuple[list[str], int]:
        """The lines of a function of a module, and the number of the first."""
        code = function.__code__
        lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
        return lines[: _length(lines)] or inspect.getsourcelines(function)[0], code.co_firstlineno


def _length(lines: list[str]) -> int:
    """Returns how many lines a function takes that begins with the first; 0 if it is indented."""
    end = next((index for index, line in enumerate(lines) if not line.startswith(("@", " ", ")"))), len(lines)) + 1
    if lines[0].startswith(" ") or not "".join(lines[end - 1 : end]).startswith("def "):
        return 0
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith((" ", ")"))):
        end += 1
    while not lines[end - 1].strip():
        end -= 1
    return end


if _load is not None:
    build._load_module_from_path = _load_alone
if _specialize is not None:
    jit.native_specialize_impl = _specialize_fields
jit.DependenciesFinder._update_hash = _hash_called_first
jit.inspect = _Inspect()
