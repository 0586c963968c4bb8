"""Products of bf16 numbers against float64 products of the same rounded numbers, at ragged sizes."""

import numpy as np
import pytest
import torch

from tests.support.bf16 import needs_bf16, rounded
from tests.support.models import distance

pytestmark = needs_bf16
NAN = float("nan")


def numbers(*shape):
    """A view with NaN around it: what is read beyond its rows and columns shows."""
    rows, columns = shape
    around = torch.full((rows + 3, columns + 5), NAN)
    inside = around[1 : rows + 1, :columns]
    inside.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(rows * columns)))
    return around, inside


@pytest.fixture(scope="module")
def kernels():
    """add_product, add_outer and packing, of flat arrays; compiled once."""
    from headcode.jit import njit
    from headcode.ops.cpu import factors, gemm

    @njit()
    def product(c, n, start, a, offset, row, panels, m, depth, space):
        gemm.add_product((c, 0, n), (start, 0, 0), (a, offset, row), panels, m, n, depth, space)

    @njit()
    def outer(c, begun, zeros, a, a_row, b, b_row, m, n, count, space):
        gemm.add_outer(c, 0, begun, zeros, a, a_row, b, b_row, m, n, count, space)

    @njit()
    def pack_transposed(panels, source, rows, columns):
        factors.pack_transposed(panels, source, rows, columns)

    @njit()
    def pack_rows(panels, source, rows, columns, depth, first):
        factors.pack_rows(panels, source, rows, columns, depth, first)

    return product, outer, pack_transposed, pack_rows


def filled(size, dtype):
    return np.full(size, NAN, np.float32).view(dtype)


@pytest.mark.parametrize(("dtype", "words"), [(np.uint32, 2), (np.float32, 1)])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("m", "n", "depth"), [(1, 16, 16), (13, 48, 80), (8, 32, 1040), (131, 112, 2064)])
def test_products_with_packed_weights(kernels, m, n, depth, transposed, dtype, words):
    product, _, pack_transposed, pack_rows = kernels
    around, a = numbers(m, depth)
    weight = torch.randn(depth, n)
    panels = filled(depth * n // words, dtype)
    if transposed:
        pack_transposed(panels, weight.T.contiguous().numpy().ravel(), n, depth)
    else:
        half = 16 * (depth // 32)
        for first, rows in ((0, half), (half, depth - half)):
            pack_rows(panels, weight[first : first + rows].numpy().ravel(), rows, n, depth, first)
    start, c = torch.randn(n), np.full(m * n, NAN, np.float32)
    space = filled((m + 1) * (min(depth, 1024) + 16), dtype)
    row = around.shape[1]
    product(c, n, start.numpy(), around.numpy().ravel(), row, row, panels, m, depth, space)
    factors = [rounded(t).double() if words == 2 else t.double() for t in (a, weight)]
    assert distance(torch.from_numpy(c).view(m, n), start + factors[0] @ factors[1]) < 1e-6


@pytest.mark.parametrize(("dtype", "round_factor"), [(np.uint32, rounded), (np.float32, lambda x: x)])
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize(("m", "n", "count"), [(16, 16, 1), (48, 80, 13), (112, 32, 64), (16, 144, 127)])
def test_products_over_tokens(kernels, m, n, count, begun, dtype, round_factor):
    """An odd number of tokens is filled up with zeros, whatever lies behind them."""
    _, outer, _, _ = kernels
    (around_a, a), (around_b, b) = numbers(count, m), numbers(count, n)
    before = torch.randn(m, n)
    c = before.numpy().ravel().copy() if begun else np.full(m * n, NAN, np.float32)
    space = filled((count + 1) * (max(m, n) + 16), dtype)
    rows = [around[1:].numpy().ravel() for around in (around_a, around_b)]
    outer(c, begun, np.zeros(n, np.float32), rows[0], m + 5, rows[1], n + 5, m, n, count, space)
    expected = round_factor(a).double().T @ round_factor(b).double() + begun * before
    assert distance(torch.from_numpy(c).view(m, n), expected) < 1e-6


def test_rounding_is_to_the_nearest_and_ties_to_even(kernels):
    product, _, pack_transposed, _ = kernels
    special = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3e38, -0.0, 1e-30, 255.5, NAN])
    a = torch.zeros(16)
    a[: len(special)] = special
    panels, c = filled(16 * 8, np.uint32), np.full(16 * 16, NAN, np.float32)
    pack_transposed(panels, torch.eye(16).numpy().ravel(), 16, 16)
    # Each number alone, on the diagonal: in one row NaN would reach all.
    rows = torch.diag(a).where(torch.eye(16) == 1, 0.0)
    product(c, 16, np.zeros(16, np.float32), rows.numpy().ravel(), 0, 16, panels, 16, 16, filled(17 * 32, np.uint32))
    found = torch.from_numpy(c).view(16, 16).diag()
    torch.testing.assert_close(found, a.bfloat16().float(), rtol=0, atol=0, equal_nan=True)
    assert found[:4].tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, -1.0]
