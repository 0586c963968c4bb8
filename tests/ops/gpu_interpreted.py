"""The Triton kernels under Triton's interpreter, against the float64 reference.

Not collected by itself: `test_gpu_values.py` runs this file in a process of its own, with TRITON_INTERPRET=1 set before
any kernel is decorated.
"""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headcode.ops import explain_backend, hyper_attention, reference
from headcode.ops.dropout import keep_mask
from headcode.ops.options import AttentionInputs, AttentionOptions
from headcode.ops.registration import registered as forward_op
from headcode.ops.registration import registered_backward as backward_op
from headcode.ops.triton import backend as gpu
from headcode.ops.triton import plan, tuning
from headcode.ops.triton.tuning import Tiles
from tests.ops.test_cpu_values import check_errors, double, plain, relative_error
from tests.ops.test_cpu_values import fused as fused_by
from tests.ops.test_registration import check_compiled

assert gpu.INTERPRETED
FORWARD_BOUND, GRADIENT_BOUND = 1e-4, 1e-3


@pytest.fixture(autouse=True)
def settings_of_the_library(monkeypatch):
    """Tests that set tiles or precision do so until they end."""
    monkeypatch.setattr(tuning, "first_guess", tuning.first_guess)
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def use_tiles(queries, keys, matrix_units=False):
    """Small tiles and chunks, so that short sequences and narrow heads need several of each.

    With `matrix_units` wide heads take the path of TF32 and half precision; the interpreter's products are exact, so
    that this path is held to float32's bounds too.
    """
    torch.set_float32_matmul_precision("high" if matrix_units else "highest")

    def tiles(call, kind):
        smallest = 16 if call.qk_wide or call.v_wide else 1
        rows, cols = max(queries, smallest), max(keys, smallest)
        chunks = (16 if call.qk_wide else 4, 16 if call.v_wide else 4)
        return Tiles(rows, rows if kind == "band" else cols, *chunks, 4)

    tuning.first_guess = tiles


fused = functools.partial(fused_by, backend=gpu)


def check(tensors, options, bounds=(FORWARD_BOUND, GRADIENT_BOUND)):
    """Relative RMS error, as the tests of the CPU kernels have it: see `test_cpu_values.check_problem`."""
    check_errors(tensors, options, bounds, fused(*tensors, options))


def options_of(queries, keys, **changes):
    options = AttentionOptions(False, 0.5, "rms_head", "relu", "sum", 0.0, 0, query_offset=keys - queries)
    return replace(options, **changes)


def tensors_of(batch, heads, queries, keys, qk_width, v_width, mask=None, band=True, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=generator)
    tensors = [normal(batch, heads, queries, qk_width), normal(batch, heads, keys, qk_width)]
    tensors += [normal(batch, heads, keys, v_width)]
    tensors = [t.to(dtype) for t in tensors]
    tensors.append(mask)
    tensors.append(normal(heads, queries + keys - 1).to(dtype) if band else None)
    return [*tensors, normal(batch, heads, queries, v_width).to(dtype)]


LENGTHS = st.sampled_from([1, 2, 3, 5, 7, 11, 13])
WIDTHS = st.sampled_from([1, 2, 3, 5, 7, 16, 17, 19])
HEADS = st.sampled_from([1, 2, 3, 5, 7, 17])


@st.composite
def problems(draw, lengths=LENGTHS, widths=WIDTHS, heads=HEADS):
    """Tiles, tensors and options of one call."""
    batch, heads = draw(st.sampled_from([1, 2])), draw(heads)
    queries, keys, qk_width, v_width = draw(lengths), draw(lengths), draw(widths), draw(widths)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    mask = None
    if kind := draw(st.sampled_from([None, "key", "dense"])):
        shape = (draw(st.sampled_from([1, batch])), 1, 1 if kind == "key" else queries, keys)
        mask = torch.randn(shape, generator=generator) > draw(st.sampled_from([-1.0, 0.0, 2.0]))
    tensors = tensors_of(
        batch, heads, queries, keys, qk_width, v_width, mask, draw(st.booleans()), seed=draw(st.integers(0, 2**32))
    )
    options = AttentionOptions(
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, qk_width**-0.5])),
        norm=draw(st.sampled_from(gpu.NORMS)),
        value_net=draw(st.sampled_from(gpu.NETS)),
        pooling=draw(st.sampled_from(["sum", "mean", "sqrt"])),
        dropout=draw(st.sampled_from([0.0, 0.1, 0.7])),
        dropout_seed=draw(st.integers(0, 2**63 - 1)),
        query_offset=draw(st.sampled_from([keys - queries, 0, keys - queries + 3, -2])),
    )
    tiles = (*draw(st.sampled_from([(4, 8), (8, 4), (16, 16)])), draw(st.booleans()))
    return tiles, tensors, options


SETTINGS = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


def check_problem(problem):
    tiles, tensors, options = problem
    use_tiles(*tiles)
    check(tensors, options)


@settings(SETTINGS, max_examples=4)
@given(problem=problems())
def test_values_and_gradients_are_the_references(problem):
    check_problem(problem)


@pytest.mark.slow
@settings(SETTINGS, max_examples=120, derandomize=False)
@given(problem=problems())
def test_values_and_gradients_are_the_references_many_times(problem):
    check_problem(problem)


@pytest.mark.slow
@settings(SETTINGS, max_examples=12, derandomize=False)
@given(problem=problems(st.sampled_from([1, 2, 3, 5]), st.integers(1, 128), st.integers(1, gpu.MOST_HEADS)))
def test_the_whole_range_of_heads_and_widths(problem):
    check_problem(problem)


@pytest.mark.parametrize("value_net", gpu.NETS)
@pytest.mark.parametrize("norm", gpu.NORMS)
def test_every_norm_and_value_net_with_every_feature(norm, value_net):
    mask = torch.rand(1, 1, 1, 7, generator=torch.Generator().manual_seed(1)) > 0.2
    use_tiles(4, 4)
    options = options_of(3, 7, causal=True, norm=norm, value_net=value_net, dropout=0.1, dropout_seed=2**50 + 3)
    check(tensors_of(1, 3, 3, 7, 3, 2, mask), options)


@pytest.mark.parametrize(
    ("norm", "value_net", "matrix_units"),
    [("rms_head", "relu", False), ("none", "linear", True), ("softmax", "gelu", True)],
)
def test_wide_heads_in_several_chunks(norm, value_net, matrix_units):
    """Sums over chunks go to memory and are added there."""
    use_tiles(16, 16, matrix_units)
    options = options_of(5, 17, norm=norm, value_net=value_net, dropout=0.2, dropout_seed=5)
    check(tensors_of(1, 3, 5, 17, 17, 19, band=False), options)


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "value_net"), [("none", "silu"), ("rms_head", "relu"), ("softmax", "linear")])
@pytest.mark.parametrize(("width", "precision"), [(4, "highest"), (67, "high")])
def test_many_tiles_with_the_librarys_own_cut(norm, value_net, width, precision):
    """Longer than PACK_FROM_LENGTH, below which inputs are read where they are."""
    torch.set_float32_matmul_precision(precision)
    keys = plan.PACK_FROM_LENGTH + 3
    mask = torch.rand(1, 1, 1, keys, generator=torch.Generator().manual_seed(1)) > 0.2
    options = options_of(37, keys, causal=True, norm=norm, value_net=value_net, dropout=0.1, dropout_seed=2**50 + 3)
    check(tensors_of(1, 5, 37, keys, width, width, mask), options)


@pytest.mark.parametrize(
    ("heads", "width"), [(1, 1), (64, 1), (1, 128), (32, 128), pytest.param(64, 128, marks=pytest.mark.slow)]
)
def test_the_smallest_and_the_largest_heads(heads, width):
    torch.set_float32_matmul_precision("high")
    check(tensors_of(1, heads, 2, 3, width, width, band=width == 1), options_of(2, 3, scale=width**-0.5))


@pytest.mark.parametrize(
    ("dtype", "norm", "width"),
    [(torch.bfloat16, "rms_head", 3), (torch.float16, "softmax", 3), (torch.bfloat16, "softmax", 19)],
)
def test_half_precision_sums_in_float32(dtype, norm, width):
    """Over 599 terms: sums in half precision would be off by several units. Codes and hidden layers are rounded before
    matrix products, and nothing else is."""
    unit = torch.finfo(dtype).eps
    use_tiles(4, 256)
    tensors = tensors_of(1, 2, 3, 599 if width == 3 else 23, width, width, dtype=dtype, band=False)
    check(tensors, options_of(3, tensors[1].shape[2], norm=norm, pooling="mean"), bounds=(2 * unit, 4 * unit))


def test_the_dropout_mask_is_every_backends():
    """Codes and values of 1: the output counts the keys that are kept, bit for bit."""
    queries, keys = 11, 13
    for seed, offset, dropout in [(0, 2, 0.1), (2**63 - 1, -3, 0.5), (2**32, 40, 0.9)]:
        q, k = torch.ones(1, 1, queries, 1), torch.ones(1, 1, keys, 1)
        v = torch.eye(keys)[None, None]
        options = options_of(queries, keys, norm="none", value_net="linear", scale=1.0)
        options = replace(options, dropout=dropout, dropout_seed=seed, query_offset=offset)
        out = torch.empty(1, 1, queries, keys)
        gpu.forward(AttentionInputs(q, k, v), options, out=out, saved=torch.empty(0))
        assert torch.equal(out[0, 0] > 0, keep_mask(dropout, seed, queries, keys, offset))


@pytest.mark.parametrize(("norm", "value_net"), [("none", "relu"), ("rms_head", "linear"), ("softmax", "relu")])
def test_a_query_that_sees_nothing_gets_zero(norm, value_net):
    mask = torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 1, 5)
    tensors = tensors_of(2, 3, 5, 5, 2, 2, mask, band=False)
    for result in fused(*tensors, options_of(5, 5, norm=norm, value_net=value_net)):
        assert (result[1] == 0).all()
        assert result[0].isfinite().all() and (result[0] != 0).any()
    tensors[3] = None
    for result in fused(*tensors, options_of(5, 5, norm=norm, value_net=value_net, causal=True, query_offset=-7)):
        assert (result == 0).all()


@pytest.mark.parametrize("value_net", ["linear", "relu"])
def test_rms_head_over_one_head_keeps_the_little_gradient_that_is_left(value_net):
    torch.manual_seed(0)
    q, k = torch.rand(1, 1, 3, 4) + 0.5, torch.rand(1, 1, 5, 4) + 0.5
    v, grad = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 3, 4)
    options = options_of(0, 0, value_net=value_net, scale=1.0)
    use_tiles(2, 2)
    actual = fused(q, k, v, None, None, grad, options)
    wanted = plain(*(t.double() for t in (q, k, v)), None, None, grad.double(), options)
    for result, exact in zip(actual[:4], wanted[:4], strict=True):
        assert relative_error(result, exact, floor=0.0) <= 1e-5


@pytest.mark.parametrize("shape", [(0, 2, 3, 5), (2, 3, 0, 5), (2, 3, 5, 0)])
def test_nothing_to_do(shape):
    batch, heads, queries, keys = shape
    q, k, v, _, band, grad = tensors_of(batch, heads, queries, keys, 2, 3)
    wanted = [t.requires_grad_() for t in (q, k, v, band)]
    out = hyper_attention(q, k, v, relative_bias=band, backend="triton")
    for result, like in zip((out, *torch.autograd.grad(out, wanted, grad)), (grad, *wanted), strict=True):
        assert result.shape == like.shape and (result == 0).all()


def test_any_strides():
    """Views of a fused projection, broadcast keys and gradient, a transposed last axis, a strided band."""
    projection = torch.randn(2, 5, 3 * 3 * 4)
    q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in projection.chunk(3, -1))
    band = torch.randn(9, 3).t()
    for tensors in (
        [q, k, v, None, band, torch.ones(()).expand(2, 3, 5, 4)],
        [q[:1].expand(2, -1, -1, -1), k[:, :1].expand(-1, 3, -1, -1), v, None, band, v],
        [q.transpose(2, 3).contiguous().transpose(2, 3), k.flip(2), v[..., ::2], None, None, q[..., 1::2]],
    ):
        check(tensors, options_of(5, 5))


def test_far_places_need_64_bits():
    """Strides whose products overflow 32 bits; the memory between is never touched."""
    q, k, v, _, _, grad = tensors_of(1, 3, 2, 5, 2, 2, band=False, dtype=torch.bfloat16)
    strides = (1, 2**30 + 8, 2, 1)
    far = torch.empty(sum((n - 1) * s for n, s in zip(q.shape, strides, strict=True)) + 1, dtype=q.dtype)
    far = far.as_strided(q.shape, strides)
    far.copy_(q)
    check([far, k, v, None, None, grad], options_of(2, 5), bounds=(1e-2, 2e-2))


def test_values_outside_the_mask_are_never_read_into_the_result():
    """Padding may hold anything that is not a number."""
    tensors = tensors_of(1, 3, 5, 7, 2, 3, torch.arange(7).view(1, 1, 1, 7) < 5)
    tensors[1][:, :, 5:] = float("nan")
    for norm, value_net in (("none", "linear"), ("rms_head", "silu"), ("softmax", "silu")):
        options = options_of(5, 7, norm=norm, value_net=value_net)
        clean = [t[:, :, :5] if i in (1, 2) else t for i, t in enumerate(tensors)]
        clean[3], clean[4] = None, tensors[4][:, :9]
        out = fused(*tensors, options)[0]
        wanted = plain(*map(double, clean), replace(options, query_offset=0))[0]
        assert relative_error(out, wanted) <= FORWARD_BOUND


@pytest.mark.parametrize("value_net", ["linear", "relu"])
def test_hidden_numbers_beside_matrix_units(value_net):
    """What is not finite stays with the queries that see it; `test_edges.py` has narrow heads."""
    use_tiles(16, 16, matrix_units=True)
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(3)).view(1, 1, 5, 7) > 0.3
    mask[..., 5:] = False
    tensors, options = tensors_of(1, 3, 5, 7, 17, 19, mask), options_of(5, 7, norm="softmax", value_net=value_net)
    clean = fused(*tensors, options)
    tensors[1][:, :, 5:], tensors[2][:, :, 5:] = float("nan"), float("inf")
    for dirty, wanted in zip(fused(*tensors, options), clean, strict=True):
        torch.testing.assert_close(dirty, wanted)
    tensors[2][:, :, 0, 0] = float("nan")
    assert torch.equal(fused(*tensors, options)[0][..., 0].isnan(), mask[..., 0].expand(1, 3, 5))


def arguments(norm="rms_head", value_net="relu", pooling="sum", requires_grad=True):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 3, 5, 2), torch.randn(2, 3, 7, 2), torch.randn(2, 3, 7, 4)]
    tensors += [torch.randn(2, 1, 1, 7) > -1, None, torch.randn(3, 11), None]
    tensors = [t.requires_grad_(requires_grad) if t is not None and t.is_floating_point() else t for t in tensors]
    return (*tensors, True, 0.5, norm, value_net, pooling, 0.1, 12345, 2, None, "triton")


@pytest.mark.parametrize(("norm", "value_net"), [("rms_head", "relu"), ("softmax", "silu")])
def test_opcheck(norm, value_net):
    torch.library.opcheck(forward_op, arguments(norm, value_net))
    plain_arguments = arguments(norm, value_net, requires_grad=False)
    out, saved = forward_op(*plain_arguments)
    for need_band in (True, False):
        rest = (*plain_arguments, out, saved, False, need_band, False)
        torch.library.opcheck(backward_op, (torch.randn_like(out), *rest))


def test_torch_compile_traces_the_op_by_its_fake_kernel():
    check_compiled("triton", "aot_eager", seeds=(1, 2**61))


def test_the_public_op_takes_it_by_name_and_never_by_itself():
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))
    assert explain_backend(q, k, v).name == "cpu"
    assert "interpreter is for checks" in explain_backend(q, k, v).rejected["triton"]
    inputs = AttentionInputs(*map(double, (q, k, v)))
    wanted = reference.hyper_attention(inputs, options_of(5, 5, scale=0.5, value_net="gelu"))
    assert relative_error(hyper_attention(q, k, v, value_net="gelu", backend="triton"), wanted) <= FORWARD_BOUND


def test_a_bias_gradient_that_nobody_needs_is_not_computed(monkeypatch):
    monkeypatch.setattr(plan.TritonCall, "band_gradient", lambda self: pytest.fail("computed"))
    q, k, v = (torch.randn(1, 2, 3, 2, requires_grad=True) for _ in range(3))
    hyper_attention(q, k, v, relative_bias=torch.randn(2, 5), backend="triton").sum().backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None


def test_runs_are_bitwise_the_same():
    mask = torch.rand(2, 1, 1, 11, generator=torch.Generator().manual_seed(1)) > 0.2
    tensors, options = tensors_of(2, 3, 7, 11, 5, 3, mask), options_of(7, 11)
    for first, second in zip(fused(*tensors, options), fused(*tensors, options), strict=True):
        assert torch.equal(first, second)


def test_the_correctness_check_of_bench_gpu_passes_and_can_fail(monkeypatch):
    from headcode.bench import gpu as bench

    shapes = (bench.Shape(1, 3, 5, 3),)
    lines = list(bench.correctness(("hyla",), ("float32", "bfloat16"), shapes, "cpu"))
    assert [line.split(":")[0] for line in lines] == ["hyla, float32", "hyla, bfloat16"]
    monkeypatch.setitem(bench.BOUNDS, "float32", (1e-12, 1e-12))
    with pytest.raises(ValueError, match="The Triton kernel is wrong for hyla, float32, B1 H3 T5 D3"):
        list(bench.correctness(("hyla",), ("float32",), shapes, "cpu"))
