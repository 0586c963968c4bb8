"""Explicit SIMD for Numba: vectors of 8 lanes, and small tuples of them ("rows") that stay in registers.

Numba leaves vectorisation to LLVM, which cannot prove that our buffers do not overlap and then either guards every
short loop with checks or gives up. These intrinsics say directly what is meant, and compile to the same instructions
on every run. LLVM maps the 8 lanes to whatever the machine has (one AVX register, two NEON ones). Indices are
neither checked nor wrapped. Imported at first use only: it needs Numba. Arithmetic is in `_simd_math`.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 8

Builder = Any


class Vector(types.Type):
    """LANES numbers of one floating type."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(name=f"Vector({dtype})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Vector) -> None:
        super().__init__(manager, fe_type, vector_type(fe_type.dtype))


def vector_type(dtype: Any) -> ir.VectorType:
    return ir.VectorType(ir.FloatType() if dtype == types.float32 else ir.DoubleType(), LANES)


def _rows_type(vector: Vector, like: Any) -> types.UniTuple:
    return types.UniTuple(vector, len(like))


def _address(context: Any, builder: Builder, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _offset(builder: Builder, address: Any, count: int) -> Any:
    return builder.gep(address, [ir.Constant(ir.IntType(32), count)])


def _vector_pointer(builder: Builder, pointer: Any, lanes: int = LANES) -> Any:
    element = pointer.type.pointee
    return builder.bitcast(pointer, ir.PointerType(ir.VectorType(element, lanes)))


def _load(builder: Builder, pointer: Any, lanes: int = LANES) -> Any:
    element = pointer.type.pointee
    loaded = builder.load(_vector_pointer(builder, pointer, lanes))
    loaded.align = 4 if isinstance(element, ir.FloatType) else 8
    return loaded


def _store(builder: Builder, value: Any, pointer: Any) -> None:
    stored = builder.store(value, _vector_pointer(builder, pointer, value.type.count))
    stored.align = 4 if isinstance(value.type.element, ir.FloatType) else 8


def emit_splat(builder: Builder, scalar: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def emit_shuffle(builder: Builder, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def emit_muladd(builder: Builder, x: Any, y: Any, accumulator: Any) -> Any:
    suffix = "f32" if isinstance(x.type.element, ir.FloatType) else "f64"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(x.type, [x.type] * 3), f"llvm.fmuladd.v{LANES}{suffix}"
    )
    return builder.call(function, [x, y, accumulator])


@intrinsic
def load(typingctx, array, index):  # type: ignore[no-untyped-def]
    """The LANES numbers from array[index] on."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _load(builder, _address(context, builder, signature.args[0], *arguments))

    return Vector(array.dtype)(array, types.intp), codegen


@intrinsic
def store(typingctx, array, index, vector):  # type: ignore[no-untyped-def]
    """Write a vector to array[index] and on."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _store(builder, arguments[2], _address(context, builder, signature.args[0], *arguments[:2]))
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


@intrinsic
def splat(typingctx, array, index):  # type: ignore[no-untyped-def]
    """array[index] in every lane."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return emit_splat(builder, builder.load(_address(context, builder, signature.args[0], *arguments)))

    return Vector(array.dtype)(array, types.intp), codegen


@intrinsic
def constant(typingctx, array, value):  # type: ignore[no-untyped-def]
    """A number, converted to the array's type, in every lane."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        scalar = context.cast(builder, arguments[1], signature.args[1], signature.args[0].dtype)
        return emit_splat(builder, scalar)

    return Vector(array.dtype)(array, value), codegen


@intrinsic
def load_rows(typingctx, array, index, like):  # type: ignore[no-untyped-def]
    """len(like) vectors that follow one another."""
    rows = _rows_type(Vector(array.dtype), like)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        address = _address(context, builder, signature.args[0], *arguments[:2])
        vectors = [_load(builder, _offset(builder, address, LANES * i)) for i in range(len(like))]
        return context.make_tuple(builder, rows, vectors)

    return rows(array, types.intp, like), codegen


@intrinsic
def store_rows(typingctx, array, index, rows):  # type: ignore[no-untyped-def]
    """Write several vectors, one after the other."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        address = _address(context, builder, signature.args[0], *arguments[:2])
        for i, vector in enumerate(cgutils.unpack_tuple(builder, arguments[2])):
            _store(builder, vector, _offset(builder, address, LANES * i))
        return context.get_dummy_value()

    return types.void(array, types.intp, rows), codegen


@intrinsic
def splat_rows(typingctx, array, index, like):  # type: ignore[no-untyped-def]
    """len(like) consecutive numbers, each in every lane of its own vector."""
    rows = _rows_type(Vector(array.dtype), like)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        address = _address(context, builder, signature.args[0], *arguments[:2])
        vectors = [emit_splat(builder, builder.load(_offset(builder, address, i))) for i in range(len(like))]
        return context.make_tuple(builder, rows, vectors)

    return rows(array, types.intp, like), codegen


@intrinsic
def zero_rows(typingctx, array, like):  # type: ignore[no-untyped-def]
    """len(like) vectors of zeros."""
    rows = _rows_type(Vector(array.dtype), like)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        zero = ir.Constant(vector_type(signature.args[0].dtype), None)
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
        pairs = zip(cgutils.unpack_tuple(builder, rows), cgutils.unpack_tuple(builder, accumulators), strict=True)
        return context.make_tuple(builder, signature.return_type, [emit_muladd(builder, x, row, a) for row, a in pairs])

    return accumulators(x, rows, accumulators), codegen


@intrinsic
def dot_rows(typingctx, a, b, accumulator):  # type: ignore[no-untyped-def]
    """accumulator + Σ_i a[i] * b[i], lane by lane: one vector."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        a, b, accumulator = arguments
        for x, y in zip(cgutils.unpack_tuple(builder, a), cgutils.unpack_tuple(builder, b), strict=True):
            accumulator = emit_muladd(builder, x, y, accumulator)
        return accumulator

    return accumulator(a, b, accumulator), codegen


@intrinsic
def add_lane_sums(typingctx, array, index, rows):  # type: ignore[no-untyped-def]
    """array[index + i] += the sum of the lanes of rows[i]."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        vectors = list(cgutils.unpack_tuple(builder, arguments[2]))
        address = _address(context, builder, signature.args[0], *arguments[:2])
        for start in range(0, len(vectors), 4):
            group = vectors[start : start + 4]
            # A transposing tree: four sums cost seven shuffles and four additions, less than one alone times four.
            a, b, c, d = (group * 4)[:4]
            ab, cd = _fold(builder, a, b, 1), _fold(builder, c, d, 1)
            both = _fold(builder, ab, cd, 2)
            sums = builder.fadd(
                emit_shuffle(builder, both, both, [0, 1, 2, 3]), emit_shuffle(builder, both, both, [4, 5, 6, 7])
            )
            target = _offset(builder, address, start)
            if len(group) < 4:
                sums = emit_shuffle(builder, sums, sums, list(range(len(group))))
            _store(builder, builder.fadd(_load(builder, target, len(group)), sums), target)
        return context.get_dummy_value()

    return types.void(array, types.intp, rows), codegen


def _fold(builder: Builder, a: Any, b: Any, width: int) -> Any:
    """Add the halves of every group of 4 lanes and interleave two vectors, `width` lanes at a time."""
    low = [0, 8, 1, 9, 4, 12, 5, 13] if width == 1 else [0, 1, 8, 9, 4, 5, 12, 13]
    high = [2, 10, 3, 11, 6, 14, 7, 15] if width == 1 else [2, 3, 10, 11, 6, 7, 14, 15]
    return builder.fadd(emit_shuffle(builder, a, b, low), emit_shuffle(builder, a, b, high))


@intrinsic
def transpose(typingctx, source, index, stride, target, place, step, like):  # type: ignore[no-untyped-def]
    """Copy a LANES×LANES square, rows `stride` apart in source, to vectors of its columns: len(like) of them follow one
    another, the next group begins `step` later."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, index, stride, target, place, step, _ = arguments
        rows = []
        for _ in range(LANES):
            rows.append(_load(builder, _address(context, builder, signature.args[0], source, index)))
            index = builder.add(index, stride)
        for i, column in enumerate(_transposed(builder, rows)):
            if i % len(like) == 0:
                address = _address(context, builder, signature.args[3], target, place)
                place = builder.add(place, step)
            _store(builder, column, _offset(builder, address, i % len(like) * LANES))
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, target, types.intp, types.intp, like), codegen


@intrinsic
def transpose_back(typingctx, source, index, step, target, place, stride, like):  # type: ignore[no-untyped-def]
    """The other way: from vectors of columns to rows that lie `stride` apart in target."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, index, step, target, place, stride, _ = arguments
        columns = []
        for i in range(LANES):
            if i % len(like) == 0:
                address = _address(context, builder, signature.args[0], source, index)
                index = builder.add(index, step)
            columns.append(_load(builder, _offset(builder, address, i % len(like) * LANES)))
        for row in _transposed(builder, columns):
            _store(builder, row, _address(context, builder, signature.args[3], target, place))
            place = builder.add(place, stride)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, target, types.intp, types.intp, like), codegen


def _transposed(builder: Builder, rows: list[Any]) -> list[Any]:
    """Interleave single lanes, then pairs, then halves."""
    for distance, low, high in (
        (1, [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]),
        (2, [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]),
        (4, [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
    ):
        after = list(rows)
        for i in range(LANES):
            if not i & distance:
                after[i] = emit_shuffle(builder, rows[i], rows[i | distance], low)
                after[i | distance] = emit_shuffle(builder, rows[i], rows[i | distance], high)
        rows = after
    return [rows[i] for i in (0, 2, 1, 3, 4, 6, 5, 7)]


@intrinsic
def rolled(typingctx):  # type: ignore[no-untyped-def]
    """Keep the loop around this call as it is written.

    LLVM would unroll our short loops eightfold, for which they are too short, and take three times as long to compile.
    It may not do so around an instruction that must stay single: here an empty one, which costs nothing at run time.
    """

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        nothing = ir.FunctionType(ir.VoidType(), [])
        call = builder.asm(nothing, "", "", [], True, "hold")
        call.attributes.add("convergent")
        call.attributes.add("nounwind")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def memory(typingctx, address, like):  # type: ignore[no-untyped-def]
    """The memory at an address, as a pointer to numbers of the array's type; `carray` makes it an array."""
    pointer = types.CPointer(like.dtype)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return pointer(types.intp, like), codegen


@intrinsic
def take_next(typingctx, counter):  # type: ignore[no-untyped-def]
    """counter[0], which goes up by one: atomically, so that threads share a list of tasks."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), codegen
