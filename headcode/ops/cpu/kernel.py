"""How a compiled kernel starts: from an address to a record, to memory, to its next task; and its variants."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from headcode import private_api
from headcode.jit import njit
from headcode.ops.cpu import records, simd

# Called by kernels only: without wrappers that Python or C would need, and without a file of their own, they compile
# sooner.
stage = njit(on_disk=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
# A call with a dozen arrays costs as much as some stages' work: short stages become part of their caller.
inlined_stage = njit(on_disk=False, no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)

# Numba learns the type of memory from an example; these arrays are never read.
ATTENTION, BLOCK_PART = np.empty(0, records.ATTENTION), np.empty(0, records.BLOCK_PART)
SUM, PACKING, PACKING_JOB = (np.empty(0, dtype) for dtype in (records.SUM, records.PACKING, records.PACKING_JOB))
DECODE, DECODE_LAYER = np.empty(0, records.DECODE), np.empty(0, records.DECODE_LAYER)
WORDS, BYTES = np.empty(0, np.int64), np.empty(0, np.uint8)
SINGLE, DOUBLE = np.empty(0, np.float32), np.empty(0, np.float64)
PAIRS = np.empty(0, np.uint32)
"""Words with two bf16 numbers each, see `factors`."""

UNBOUNDED = 2**48
"""The length that memory from an address on is given: nobody checks it."""

# What a variant of a kernel is compiled for, besides LANES: stages read these, and `specialised` replaces them.
NORM, NET = records.NONE, records.LINEAR
ROWS = (0,) * 2
"""Its length is the number of vectors, one for each dim, that are worked on at once, in registers."""
WIDE = True
"""Whether heads may have more dims than that."""
NUMBERS = SINGLE


class Variants:
    """Kernels by their `records.Variant`, made when asked: each runs `tasks(address)`, until no task is left."""

    def __init__(self, tasks: Callable[[int], None]) -> None:
        self._tasks = tasks
        self.made: dict[records.Variant, Any] = {}

    def __getitem__(self, variant: records.Variant) -> Any:
        if variant not in self.made:
            self.made[variant] = self._make(variant)
        return self.made[variant]

    def _make(self, variant: records.Variant) -> Any:
        tasks = specialised(self._tasks, variant)

        def kernel(address):  # type: ignore[no-untyped-def]
            tasks(address)

        return njit(key=(tasks.__module__, tasks.__name__))(kernel)


@functools.cache
def _constants(variant: records.Variant) -> dict[str, Any]:
    return {
        "NORM": variant.norm,
        "NET": variant.net,
        "ROWS": (0,) * variant.rows,
        "WIDE": variant.wide,
        "LANES": variant.lanes,
        "NUMBERS": DOUBLE if variant.double else SINGLE,
    }


_specialised: dict[tuple[Any, records.Variant], Any] = {}


def specialised(function: Any, variant: records.Variant) -> Any:
    """A stage, and all that it calls, with a variant's numbers in the place of its module's constants.

    What Numba finds in a module it takes for constant: branches that these decide are never compiled.
    """
    if simd.has_lanes(function):
        return simd.with_lanes(function, variant.lanes)
    if not hasattr(function, "py_func"):
        return function
    given = function.py_func
    if (given, variant) not in _specialised:
        known = {name: given.__globals__[name] for name in given.__code__.co_names if name in given.__globals__}
        replaced = {name: specialised(value, variant) for name, value in known.items()}
        replaced |= {name: number for name, number in _constants(variant).items() if name in known}
        _specialised[given, variant] = function
        if any(replaced[name] is not known[name] for name in known):
            copy = FunctionType(given.__code__, given.__globals__ | replaced)
            # Numba makes symbols of names: without one of its own, kernels from the cache would call each other's.
            copy.__name__ = copy.__qualname__ = "_".join(map(str, (given.__name__, *map(int, variant))))
            _specialised[given, variant] = (inlined_stage if function.targetoptions.get("forceinline") else stage)(copy)
    return _specialised[given, variant]


PRODUCTS = {"float32": SINGLE, "bf16": PAIRS}
"""name -> the type of what the products of a kernel read."""


def product_kernels(tasks: Callable[..., None]) -> dict[str, Any]:
    """Decorator of `tasks(address, factors)`, which takes tasks until none is left: its kernels, by their products."""
    body = stage(tasks)
    return {products: _product_kernel(body, products) for products in PRODUCTS}


def _product_kernel(tasks: Any, products: str) -> Any:
    factors = PRODUCTS[products]

    @njit(key=(tasks.__module__, tasks.__name__, products))
    def kernel(address):  # type: ignore[no-untyped-def]
        tasks(address, factors)

    return kernel


@intrinsic
def _pointer(typingctx, address, like):  # type: ignore[no-untyped-def]
    """The memory at an address, as a pointer to numbers of the array's type; `carray` makes it an array."""
    pointer = types.CPointer(like.dtype)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return pointer(types.intp, like), codegen


@stage
def array_at(address, like):  # type: ignore[no-untyped-def]
    """The memory from an address on, as an array of like's type."""
    return carray(_pointer(address, like), UNBOUNDED)


@intrinsic
def fetch_add(typingctx, counter):  # type: ignore[no-untyped-def]
    """counter[0], which goes up by one: atomically, so that threads share a list of tasks."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = private_api.array_data(context, builder, signature.args[0], arguments[0])
        return builder.atomic_rmw("add", data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), codegen


@intrinsic
def no_unroll(typingctx):  # type: ignore[no-untyped-def]
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
