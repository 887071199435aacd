"""Triton's interpreter, with less work per operation: programs compute what they do otherwise.

Most of its time goes not to numbers but to types, which it makes anew for every result, with their names and those of
their shapes. Here there is one of each. Nothing else uses the language in a process of tests.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
from triton import language
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

core: Any = language.core


def be_quick() -> None:
    """Patches the interpreter for as long as the process lives; once is enough."""
    _unwrap_quickly()
    _share_types()
    _compare_types_quickly()
    _spread_quickly()
    _agree_quickly()
    _check_no_sizes()
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


def _spread_quickly() -> None:
    """Most operands have the same shape, or one is a scalar, which all elements of a block can share."""
    broadcast, with_element = TritonSemantic.broadcast_impl_value, core.block_type.with_element_ty

    def of_element(self: Any, kind: Any) -> Any:
        known = self.__dict__.setdefault("others", {})
        if kind.name not in known:
            known[kind.name] = with_element(self, kind)
        return known[kind.name]

    def spread(value: Any, block: Any) -> Any:
        shape, data = block.shape, numpy.asarray(value.handle.data)
        shared = numpy.ndarray(shape, data.dtype, data.reshape(1), strides=(0,) * len(shape))
        handle = interpreter.TensorHandle(shared, value.handle.dtype.scalar)
        return core.tensor(handle, block.with_element_ty(value.type.scalar))

    def repeated(value: Any, block: Any) -> Any:
        if value.type.shape.values == block.shape.values:
            return value
        data = numpy.broadcast_to(value.handle.data, block.shape.values)
        handle = interpreter.TensorHandle(data, value.handle.dtype.scalar)
        return core.tensor(handle, block.with_element_ty(value.type.scalar))

    def values(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one is other:
            return lhs, rhs
        blocks = one.is_block(), other.is_block()
        if blocks == (True, True):
            left, right = one.shape.values, other.shape.values
            if left == right:
                return lhs, rhs
            key = (*left, 0, *right)
            if key not in together:
                together[key] = broadcast(self, lhs, rhs)[0].type
            return repeated(lhs, together[key]), repeated(rhs, together[key])
        if blocks == (True, False):
            return lhs, spread(rhs, one)
        return (spread(lhs, other), rhs) if blocks[1] else (lhs, rhs)

    together: dict[Any, Any] = {}
    core.block_type.with_element_ty = of_element
    TritonSemantic.broadcast_impl_value = values


def _agree_quickly() -> None:
    """What two types become, and a number beside a type, is known from the first time."""
    agree = TritonSemantic.binary_op_type_checking_impl
    whole = {"int32", "int64", "uint32", "uint64", "fp32", "fp64"}
    """Types that all operations keep."""
    constants: dict[Any, Any] = {}
    common: dict[Any, Any] = {}

    def become(before: Any, after: Any) -> Any:
        """The type of elements, or None where it stays."""
        return None if before.type.scalar.name == after.type.scalar.name else after.type.scalar

    def of_tensors(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        key = (lhs.type.scalar.name, rhs.type.scalar.name, flags, *named.items())
        if key not in common:
            found = agree(self, lhs, rhs, *flags, **named)
            common[key] = become(lhs, found[0]), become(rhs, found[1])
            return found
        left, right = common[key]
        lhs = lhs if left is None else self.cast(lhs, left)
        rhs = rhs if right is None else self.cast(rhs, right)
        return self.broadcast_impl_value(lhs, rhs)

    def of_operands(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        if lhs.__class__ is not core.tensor:
            return agree(self, lhs, rhs, *flags, **named)
        kind = lhs.type
        if rhs.__class__ is core.tensor:
            if kind is rhs.type and kind.scalar.name in whole:
                return lhs, rhs
            return of_tensors(self, lhs, rhs, *flags, **named)
        if rhs.__class__ not in (int, float) or kind.scalar.name not in whole:
            return agree(self, lhs, rhs, *flags, **named)
        key = (kind.scalar.name, getattr(kind, "shape", ()), rhs.__class__, rhs or repr(rhs))
        if key in constants:
            data, known = constants[key]
            return lhs, core.tensor(interpreter.TensorHandle(data, known.scalar), known)
        found = agree(self, lhs, rhs, *flags, **named)
        if found[0] is lhs:
            constants[key] = found[1].handle.data, found[1].type
        return found

    TritonSemantic.binary_op_type_checking_impl = of_operands


def _check_no_sizes() -> None:
    """Results have the sizes of their types but where integers are widened, which is asked where they are computed."""

    def handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    interpreter.TensorHandle.__init__ = handle


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
