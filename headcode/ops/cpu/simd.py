"""Explicit SIMD for Numba: vectors of numbers, and small tuples of them ("rows") that stay in registers.

Numba leaves vectorisation to LLVM, which cannot prove that our buffers do not overlap and then either guards every
short loop with checks or gives up. These intrinsics say directly what is meant, and compile to the same instructions
on every run. A vector has LANES numbers, and in a kernel that is specialised for another number (`kernel.specialised`),
that many. LLVM maps the lanes to whatever the machine has (one AVX register, two NEON ones). Indices are neither
checked nor wrapped. Imported at first use only: it needs Numba. Arithmetic is in `simd_math`, what moves numbers
between lanes in `simd_shuffles`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from headcode import private_api
from headcode.ops.cpu.records import COLUMNS, LANES

Builder = Any


class Vector(types.Type):
    """Numbers of one floating type, LANES of them unless said otherwise."""

    def __init__(self, dtype: Any, lanes: int = LANES) -> None:
        self.dtype, self.lanes = dtype, lanes
        super().__init__(name=f"Vector({dtype}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Vector) -> None:
        super().__init__(manager, fe_type, vector_type(fe_type.dtype, fe_type.lanes))


_definitions: dict[Any, Callable[..., Any]] = {}


def by_lanes(define: Callable[..., Any]) -> Any:
    """An intrinsic for vectors of LANES numbers, from a definition whose first argument is their number.

    For those intrinsics alone whose arguments are no vectors: the others see the number of lanes in these.
    """
    made = _intrinsic_for(define, LANES)
    _definitions[made] = define
    return made


def has_lanes(function: Any) -> bool:
    """Whether this is an intrinsic of `by_lanes`."""
    return isinstance(function, type(load)) and function in _definitions


@functools.cache
def with_lanes(function: Any, lanes: int) -> Any:
    """The same intrinsic for vectors of another number of lanes."""
    return _intrinsic_for(_definitions[function], lanes)


def _intrinsic_for(define: Callable[..., Any], lanes: int) -> Any:
    @functools.wraps(define)
    def definition(typingctx: Any, *arguments: Any) -> Any:
        return define(lanes, typingctx, *arguments)

    given = inspect.signature(define)
    definition.__signature__ = given.replace(parameters=list(given.parameters.values())[1:])  # type: ignore[attr-defined]
    return intrinsic(definition)


def vector_type(dtype: Any, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(ir.FloatType() if dtype == types.float32 else ir.DoubleType(), lanes)


def rows_type(vector: Vector, like: Any) -> types.UniTuple:
    return types.UniTuple(vector, len(like))


def emit_address(context: Any, builder: Builder, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(private_api.array_data(context, builder, array_type, array), [index])


def emit_offset(builder: Builder, address: Any, count: int) -> Any:
    return builder.gep(address, [ir.Constant(ir.IntType(32), count)])


def _vector_pointer(builder: Builder, pointer: Any, lanes: int = LANES) -> Any:
    element = pointer.type.pointee
    return builder.bitcast(pointer, ir.PointerType(ir.VectorType(element, lanes)))


def _alignment(element: Any) -> int:
    return 8 if isinstance(element, ir.DoubleType) else 4


def emit_load(builder: Builder, pointer: Any, lanes: int = LANES) -> Any:
    element = pointer.type.pointee
    loaded = builder.load(_vector_pointer(builder, pointer, lanes))
    loaded.align = _alignment(element)
    return loaded


def emit_store(builder: Builder, value: Any, pointer: Any) -> None:
    stored = builder.store(value, _vector_pointer(builder, pointer, value.type.count))
    stored.align = _alignment(value.type.element)


def _emit_masked(builder: Builder, name: str, kind: Any, result: Any, arguments: list[Any]) -> Any:
    """LLVM's masked load or store of vectors of a kind."""
    element = "f32" if isinstance(kind.element, ir.FloatType) else "f64"
    vector = f"v{kind.count}{element}"
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    function = builder.module.declare_intrinsic(f"llvm.masked.{name}.{vector}.p0{vector}", fnty=signature)
    return builder.call(function, arguments)


def emit_masked_load(builder: Builder, pointer: Any, there: Any) -> Any:
    """The lanes that are there, 0 in place of the others, which are not read."""
    kind = ir.VectorType(pointer.type.pointee, there.type.count)
    alignment = ir.Constant(ir.IntType(32), _alignment(kind.element))
    address = _vector_pointer(builder, pointer, kind.count)
    return _emit_masked(builder, "load", kind, kind, [address, alignment, there, ir.Constant(kind, None)])


def emit_masked_store(builder: Builder, value: Any, pointer: Any, there: Any) -> None:
    """Write the lanes that are there."""
    alignment = ir.Constant(ir.IntType(32), _alignment(value.type.element))
    address = _vector_pointer(builder, pointer, value.type.count)
    _emit_masked(builder, "store", value.type, ir.VoidType(), [value, address, alignment, there])


def emit_splat(builder: Builder, scalar: Any, lanes: int = LANES) -> Any:
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


def emit_shuffle(builder: Builder, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def emit_intrinsic(builder: Builder, name: str, *vectors: Any) -> Any:
    """LLVM's own function of vectors of one type, lane by lane."""
    kind = vectors[0].type
    suffix = "f32" if isinstance(kind.element, ir.FloatType) else "f64"
    signature = ir.FunctionType(kind, [kind] * len(vectors))
    return builder.call(builder.module.declare_intrinsic(f"llvm.{name}.v{kind.count}{suffix}", fnty=signature), vectors)


def emit_muladd(builder: Builder, x: Any, y: Any, accumulator: Any) -> Any:
    return emit_intrinsic(builder, "fmuladd", x, y, accumulator)


def emit_prefetch(builder: Builder, address: Any) -> None:
    """Have the numbers at an address brought near, for reading and writing; there need not be any."""
    pointer, flag = ir.PointerType(ir.IntType(8)), ir.IntType(32)
    signature = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
    function = builder.module.declare_intrinsic("llvm.prefetch.p0i8", fnty=signature)
    builder.call(function, [builder.bitcast(address, pointer), *(ir.Constant(flag, value) for value in (0, 3, 1))])


def emit_rows(builder: Builder, rows: Any) -> list[Any]:
    """The vectors of a tuple."""
    return [builder.extract_value(rows, i) for i in range(rows.type.count)]


@by_lanes
def load(lanes, typingctx, array, index):  # type: ignore[no-untyped-def]
    """The LANES numbers from array[index] on."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return emit_load(builder, emit_address(context, builder, signature.args[0], *arguments), lanes)

    return Vector(array.dtype, lanes)(array, types.intp), codegen


@intrinsic
def load_wide(typingctx, array, index):  # type: ignore[no-untyped-def]
    """The COLUMNS numbers from array[index] on, in one vector: for long arithmetic on a processor with AVX-512."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return emit_load(builder, emit_address(context, builder, signature.args[0], *arguments), COLUMNS)

    return Vector(array.dtype, COLUMNS)(array, types.intp), codegen


@intrinsic
def prefetch(typingctx, array, index):  # type: ignore[no-untyped-def]
    """Have the numbers around array[index] brought near; the array may have ended before."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        emit_prefetch(builder, emit_address(context, builder, signature.args[0], *arguments))
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def store(typingctx, array, index, vector):  # type: ignore[no-untyped-def]
    """Write a vector to array[index] and on."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        emit_store(builder, arguments[2], emit_address(context, builder, signature.args[0], *arguments[:2]))
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


@by_lanes
def splat(lanes, typingctx, array, index):  # type: ignore[no-untyped-def]
    """array[index] in every lane."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return emit_splat(builder, builder.load(emit_address(context, builder, signature.args[0], *arguments)), lanes)

    return Vector(array.dtype, lanes)(array, types.intp), codegen


@by_lanes
def constant(lanes, typingctx, like, value):  # type: ignore[no-untyped-def]
    """A number in every lane of a vector: of the type of another vector, or with the numbers of an array."""
    lanes = like.lanes if isinstance(like, Vector) else lanes

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        scalar = context.cast(builder, arguments[1], signature.args[1], signature.args[0].dtype)
        return emit_splat(builder, scalar, lanes)

    return Vector(like.dtype, lanes)(like, value), codegen


@by_lanes
def load_rows(lanes, typingctx, array, index, like):  # type: ignore[no-untyped-def]
    """len(like) vectors that follow one another."""
    rows = rows_type(Vector(array.dtype, lanes), like)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        address = emit_address(context, builder, signature.args[0], *arguments[:2])
        vectors = [emit_load(builder, emit_offset(builder, address, lanes * i), lanes) for i in range(len(like))]
        return context.make_tuple(builder, rows, vectors)

    return rows(array, types.intp, like), codegen


@by_lanes
def load_steps(lanes, typingctx, array, index, step, like):  # type: ignore[no-untyped-def]
    """len(like) vectors that begin `step` apart."""
    rows = rows_type(Vector(array.dtype, lanes), like)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        address = emit_address(context, builder, signature.args[0], *arguments[:2])
        vectors = []
        for _ in range(len(like)):
            vectors.append(emit_load(builder, address, lanes))
            address = builder.gep(address, [arguments[2]])
        return context.make_tuple(builder, rows, vectors)

    return rows(array, types.intp, types.intp, like), codegen


@intrinsic
def store_rows(typingctx, array, index, rows):  # type: ignore[no-untyped-def]
    """Write several vectors, one after the other."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        address = emit_address(context, builder, signature.args[0], *arguments[:2])
        for i, vector in enumerate(emit_rows(builder, arguments[2])):
            emit_store(builder, vector, emit_offset(builder, address, vector.type.count * i))
        return context.get_dummy_value()

    return types.void(array, types.intp, rows), codegen


@by_lanes
def splat_rows(lanes, typingctx, array, index, like):  # type: ignore[no-untyped-def]
    """len(like) consecutive numbers, each in every lane of its own vector."""
    rows = rows_type(Vector(array.dtype, lanes), like)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        address = emit_address(context, builder, signature.args[0], *arguments[:2])
        numbers = [builder.load(emit_offset(builder, address, i)) for i in range(len(like))]
        vectors = [emit_splat(builder, number, lanes) for number in numbers]
        return context.make_tuple(builder, rows, vectors)

    return rows(array, types.intp, like), codegen


@by_lanes
def zero_rows(lanes, typingctx, array, like):  # type: ignore[no-untyped-def]
    """len(like) vectors of zeros."""
    rows = rows_type(Vector(array.dtype, lanes), like)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        zero = ir.Constant(vector_type(signature.args[0].dtype, lanes), None)
        return context.make_tuple(builder, rows, [zero] * len(like))

    return rows(array, like), codegen


@intrinsic
def muladd(typingctx, x, y, accumulator):  # type: ignore[no-untyped-def]
    """accumulator + x * y."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return emit_muladd(builder, *arguments)

    return accumulator(x, y, accumulator), codegen


@intrinsic
def muladd_rows(typingctx, x, rows, accumulators):  # type: ignore[no-untyped-def]
    """accumulators[i] + x * rows[i] for every i; x is one vector."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        x, rows, accumulators = arguments
        pairs = zip(emit_rows(builder, rows), emit_rows(builder, accumulators), strict=True)
        return context.make_tuple(builder, signature.return_type, [emit_muladd(builder, x, row, a) for row, a in pairs])

    return accumulators(x, rows, accumulators), codegen


@intrinsic
def dot_rows(typingctx, a, b, accumulator):  # type: ignore[no-untyped-def]
    """accumulator + Σ_i a[i] * b[i], lane by lane: one vector."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        a, b, accumulator = arguments
        for x, y in zip(emit_rows(builder, a), emit_rows(builder, b), strict=True):
            accumulator = emit_muladd(builder, x, y, accumulator)
        return accumulator

    return accumulator(a, b, accumulator), codegen
