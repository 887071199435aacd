"""Triton's interpreter, with less work per operation: programs compute what they do otherwise.

Most of its time goes not to numbers but to types, which it makes anew for every result, with their names and those of
their shapes. Here there is one of each. Nothing else uses the language in a process of tests.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from triton import language
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

core: Any = language.core


def be_quick() -> None:
    """Patches the interpreter for as long as the process lives; once is enough."""
    _unwrap_quickly()
    _share_types()
    _compare_types_quickly()
    _leave_out_broadcasts()
    _leave_out_overflows()
    _stay_patched()


def _unwrap_quickly() -> None:
    """Most values that may be compile-time constants are those or tensors; nearly all assigned ones are tensors."""
    unwrap, to_tensor = core._unwrap_if_constexpr, TritonSemantic.to_tensor

    def unwrapped(value: Any) -> Any:
        kind = value.__class__
        if kind is core.constexpr:
            return value.value
        return value if kind in (core.tensor, int, core.dtype) else unwrap(value)

    def tensor(self: Any, value: Any, check_type: bool = True) -> Any:
        return value if value.__class__ is core.tensor else to_tensor(self, value, check_type)

    core._unwrap_if_constexpr = language._unwrap_if_constexpr = unwrapped
    TritonSemantic.to_tensor = tensor


def _share_types() -> None:
    """There is one type of blocks of a shape, which knows what tensors have of it; a tuple's is made if asked for."""
    make = core.block_type.__init__
    blocks: dict[Any, Any] = {}
    numbers: dict[str, Any] = {}
    number = interpreter._get_np_dtype

    def block(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = (element_ty.name, *[core._unwrap_if_constexpr(size) for size in shape])
        if key not in blocks:
            new = object.__new__(cls)
            make(new, element_ty, shape)
            blocks[key] = new
        return blocks[key]

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        if not hasattr(kind, "of_tensors"):
            shape = [core.constexpr(size) for size in kind.shape] if kind.is_block() else []
            count = core.constexpr(kind.numel if shape else 1)
            kind.of_tensors = {"shape": core.tuple(shape), "numel": count, "type": kind, "dtype": kind.scalar}
        self.__dict__.update(kind.of_tensors, handle=handle)

    def values(self: Any, args: Any, kind: Any = None) -> None:
        self.values = [*args]
        self.known = kind if kind is None or isinstance(kind, core.tuple_type) else core.tuple_type(kind)

    def of_values(self: Any) -> Any:
        return core._type_for_tuple_values(self.values) if self.known is None else self.known

    def of_numbers(dtype: Any) -> Any:
        if dtype.name not in numbers:
            numbers[dtype.name] = number(dtype)
        return numbers[dtype.name]

    core.block_type.__new__ = staticmethod(block)
    core.block_type.__init__ = lambda self, element_ty, shape: None
    core.tensor.__init__ = tensor
    core.tuple.__init__ = values
    core.tuple.type = property(of_values, lambda self, kind: setattr(self, "known", kind))
    interpreter._get_np_dtype = of_numbers


def _compare_types_quickly() -> None:
    """Types are compared several times in each operation, mostly with themselves."""

    def shortened(equal: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda self, other: self is other or equal(self, other)

    for kind in (core.dtype, core.block_type, core.pointer_type):
        kind.__eq__ = shortened(kind.__eq__)


def _leave_out_broadcasts() -> None:
    """Most operands have the same shape."""
    broadcast = TritonSemantic.broadcast_impl_value

    def same_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one is other or (one.is_block() and other.is_block() and one.shape.values == other.shape.values):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = same_shape


def _leave_out_overflows() -> None:
    """Each sum or product of integers is computed again in 64 bits for an assertion that the interpreter ignores."""
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, binary_op: None


def _stay_patched() -> None:
    """The interpreter puts its functions in place of the language's at each launch, and again at each call within one,
    which takes a third of its time."""

    def patch(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic, builtin = TritonSemantic(builder), getattr(member, "__wrapped__", member)
        scope.set_attr(place, name, lambda *args, _semantic=None, **named: builtin(*args, _semantic=semantic, **named))

    interpreter._patch_attr = patch
    everything = SimpleNamespace(__globals__={"language": language, "core": language.core})
    scope = interpreter._patch_lang(everything)
    scope.restore = lambda: None
    interpreter._patch_lang = lambda function: scope
