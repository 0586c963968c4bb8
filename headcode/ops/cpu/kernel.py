"""How a compiled kernel starts: from an address to a record, to memory, to its next task; and its variants."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from headcode import private_api
from headcode.jit import njit
from headcode.ops.cpu import records

# Called by kernels only: without the wrappers that Python or C would need, they compile sooner.
stage = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)
# A call with a dozen arrays costs as much as some stages' work: short stages become part of their caller.
inlined_stage = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)

# Numba learns the type of memory from an example; these arrays are never read.
ATTENTION, BLOCK_PART = np.empty(0, records.ATTENTION), np.empty(0, records.BLOCK_PART)
SUM, PACKING, PACKING_JOB = (np.empty(0, dtype) for dtype in (records.SUM, records.PACKING, records.PACKING_JOB))
WORDS, BYTES = np.empty(0, np.int64), np.empty(0, np.uint8)
SINGLE, DOUBLE = np.empty(0, np.float32), np.empty(0, np.float64)
PAIRS = np.empty(0, np.uint32)
"""Words with two bf16 numbers each, see `factors`."""

UNBOUNDED = 2**48
"""The length that memory from an address on is given: nobody checks it."""

VARIANTS: dict[str, tuple[Any, Any]] = {
    "": ((0,) * 4, SINGLE),
    "narrow": ((0,) * 2, SINGLE),
    "double": ((0,) * 2, DOUBLE),
}
"""name -> `like`, a tuple whose length is the number of vectors (dims) that are worked on at once, and the type of the
numbers. Narrow is for heads of width 1 and 2."""


def variants(tasks: Callable[..., None]) -> dict[str, Any]:
    """The kernels that call `tasks(address, like, numbers)`, which takes tasks until none is left, by variant."""
    return {variant: _kernel(tasks, variant) for variant in VARIANTS}


def _kernel(tasks: Callable[..., None], variant: str) -> Any:
    like, numbers = VARIANTS[variant]

    @njit(key=(tasks.__module__, tasks.__name__, variant))
    def kernel(address):  # type: ignore[no-untyped-def]
        tasks(address, like, numbers)

    return kernel


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
