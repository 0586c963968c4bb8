"""The fused CPU backend against the float64 reference: every norm × value net, shapes, masks, layouts, threads."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headcode.ops import cpu, hyper_attention, reference
from headcode.ops.options import AttentionGradients, AttentionInputs, AttentionOptions, Problem

NORMS, NETS = list(cpu.NORM_CODES), list(cpu.NET_CODES)
PRIMES = st.sampled_from([1, 2, 3, 5, 7, 11])
LENGTHS = st.one_of(st.integers(1, 130), st.sampled_from([1, 2, 7, 8, 9, 36, 63, 95, 96, 97, 127, 128, 129]))


@st.composite
def problems(draw):
    """Tensors in float64 and options of one call."""
    batch, heads = draw(st.sampled_from([1, 2, 3])), draw(PRIMES)
    queries, keys, qk_width, v_width = draw(LENGTHS), draw(LENGTHS), draw(PRIMES), draw(PRIMES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = [
        normal(batch, heads, queries, qk_width),
        normal(batch, heads, keys, qk_width),
        normal(batch, heads, keys, v_width),
        normal(1 if draw(st.booleans()) else batch, 1, 1, keys) > draw(st.sampled_from([-1.0, 0.0, 2.0])),
        normal(heads, queries + keys - 1),
        normal(batch, heads, queries, v_width),
    ]
    if not draw(st.booleans()):
        tensors[3] = None
    if not draw(st.booleans()):
        tensors[4] = None
    options = AttentionOptions(
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, qk_width**-0.5])),
        norm=draw(st.sampled_from(NORMS)),
        value_net=draw(st.sampled_from(NETS)),
        pooling=draw(st.sampled_from(["sum", "mean", "sqrt"])),
        dropout=draw(st.sampled_from([0.0, 0.1, 0.7])),
        dropout_seed=draw(st.integers(0, 2**63 - 1)),
        query_offset=draw(st.sampled_from([keys - queries, 0, keys - queries + 3, -2])),
        window=draw(st.sampled_from([None, None, 1, 3, 50])),
    )
    return tensors, options


def fused(q, k, v, mask, band, grad, options, backend=cpu, need_band=True):
    """Output and gradients from buffers that were filled with NaN: a cell that is not written shows."""

    def buffer(*shape, dtype=q.dtype):
        return torch.full(shape, float("nan"), dtype=dtype)

    inputs = AttentionInputs(q, k, v, mask, relative_bias=band)
    saved_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    saved = buffer(*backend.saved_shape(*q.shape[:3], options.norm), dtype=saved_dtype)
    out = buffer(*grad.shape)
    band_buffer = buffer(*band.shape) if band is not None and need_band else None
    gradients = AttentionGradients(*(buffer(*t.shape) for t in (q, k, v)), relative_bias=band_buffer)
    backend.forward(inputs, options, out=out, saved=saved)
    backend.backward(grad, inputs, options, out=out, saved=saved, gradients=gradients)
    return [out, *(t for t in gradients if t is not None)]


def plain(q, k, v, mask, band, grad, options):
    q, k, v, band = (None if t is None else t.detach().requires_grad_() for t in (q, k, v, band))
    out = reference.hyper_attention(AttentionInputs(q, k, v, mask, relative_bias=band), options)
    return [out.detach(), *torch.autograd.grad(out, [t for t in (q, k, v, band) if t is not None], grad)]


def size(t):
    return float(t.double().square().mean().sqrt()) if t.numel() else 0.0


def relative_error(actual, wanted, floor=0.1):
    """Relative RMS error. Where terms cancel (softmax over one key has no gradient at all), no float32 computation is
    exact relative to what is left: smaller results than `floor` count as `floor`."""
    return size(actual.double() - wanted) / max(size(wanted), floor)


def check_problem(tensors, options):
    """1e-5 for the output and 1e-4 for every gradient, relative RMS, in float32; 1e-12 and 1e-11 in float64.

    A few problems do not determine their answer that well: a ReLU's input may round to the other side of 0, and
    rms_head over a single head, s/|s|, has a cliff there. Plain PyTorch in the same precision, its inputs moved by
    their rounding, then misses these bounds too; only then, and only by as much, may ours.
    """
    for dtype, bounds in ((torch.float32, (1e-5, 1e-4)), (torch.float64, (1e-12, 1e-11))):
        given_tensors = [t if t is None or t.dtype == torch.bool else t.to(dtype) for t in tensors]
        check_errors(given_tensors, options, bounds, fused(*given_tensors, options))


def check_errors(tensors, options, bounds, actual):
    """Output and gradients of one call against the float64 reference, as `check_problem` says."""
    wanted = plain(*map(double, tensors), options)
    floor = max(0.1, 0.02 * max(map(size, wanted)))
    errors = [relative_error(*pair, floor) for pair in zip(actual, wanted, strict=True)]
    allowed = [bounds[0]] + [bounds[1]] * (len(errors) - 1)
    if any(error > bound for error, bound in zip(errors, allowed, strict=True)):
        misses = missed_by_plain(tensors, wanted, options, floor)
        allowed = [max(bound, 2 * miss) for bound, miss in zip(allowed, misses, strict=True)]
    for name, error, bound in zip(("out", "q", "k", "v", "band"), errors, allowed, strict=False):
        assert error <= bound, f"{name}, {tensors[0].dtype}: {error} > {bound}"


def missed_by_plain(tensors, wanted, options, floor, tries=32):
    """The largest errors of plain PyTorch when each input moves by a few units in its last place."""
    generator = torch.Generator().manual_seed(0)

    def nudged(t):
        if t is None or t.dtype == torch.bool:
            return t
        return t * (1 + 8 * torch.finfo(t.dtype).eps * torch.randn(t.shape, generator=generator, dtype=t.dtype))

    misses = [0.0] * len(wanted)
    for _ in range(tries):
        answers = plain(*map(nudged, tensors), options)
        misses = [max(miss, relative_error(*pair, floor)) for miss, *pair in zip(misses, answers, wanted, strict=True)]
    return misses


def double(t):
    return t if t is None or t.dtype == torch.bool else t.double()


@settings(max_examples=200, deadline=None)
@given(problem=problems())
def test_values_and_gradients_are_the_references(problem):
    check_problem(*problem)


@pytest.mark.slow
@settings(max_examples=2500, deadline=None)
@given(problem=problems())
def test_values_and_gradients_are_the_references_many_times(problem):
    check_problem(*problem)


@pytest.mark.parametrize("value_net", NETS)
@pytest.mark.parametrize("norm", NORMS)
def test_long_sequences_cross_blocks_and_tasks(norm, value_net):
    """Several blocks of keys, several tasks per batch entry, and all features at once."""
    torch.manual_seed(0)
    queries, keys = 301, 389
    tensors = [torch.randn(1, 5, queries, 4), torch.randn(1, 5, keys, 4), torch.randn(1, 5, keys, 3)]
    tensors += [torch.rand(1, 1, 1, keys) > 0.2, torch.randn(5, queries + keys - 1), torch.randn(1, 5, queries, 3)]
    options = AttentionOptions(True, 0.5, norm, value_net, "sum", 0.1, 2**50 + 3, query_offset=keys - queries)
    actual = fused(*tensors, options)
    wanted = plain(*(double(t) for t in tensors), options)
    assert relative_error(actual[0], wanted[0]) <= 1e-5
    for index in range(1, 5):
        assert relative_error(actual[index], wanted[index]) <= 1e-4


def run(q, k, v, grad, backend="cpu", **options):
    """Output and gradients through the public op."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out = hyper_attention(*inputs, backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("value_net", ["linear", "relu"])
def test_a_query_that_sees_nothing_gets_zero(norm, value_net):
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 5, 2) for _ in range(4))
    mask = torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 1, 5)
    for result in run(q, k, v, grad, norm=norm, value_net=value_net, mask=mask):
        assert (result[1] == 0).all()
        assert result[0].isfinite().all() and (result[0] != 0).any()
    # All positions lie before the first key.
    for result in run(q, k, v, grad, norm=norm, value_net=value_net, causal=True, query_offset=-7):
        assert (result == 0).all()


@pytest.mark.parametrize("norm", NORMS)
def test_what_masked_keys_hold_is_never_read(norm):
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 3, 9, 4) for _ in range(4))
    mask = torch.arange(9) < 6
    clean = run(q, k, v, grad, norm=norm, mask=mask)
    k[:, :, 6:], v[:, :, 6:] = float("nan"), float("inf")
    for dirty, result in zip(run(q, k, v, grad, norm=norm, mask=mask), clean, strict=True):
        assert torch.equal(dirty, result)
    assert (clean[2][:, :, 6:] == 0).all() and (clean[3][:, :, 6:] == 0).all()


@pytest.mark.parametrize("value_net", NETS)
@pytest.mark.parametrize("norm", NORMS)
def test_nan_is_not_hidden(norm, value_net):
    q, k, v = (torch.randn(1, 3, 5, 2) for _ in range(3))
    q[0, 1, 2, 0] = float("nan")
    out = hyper_attention(q, k, v, norm=norm, value_net=value_net, backend="cpu")
    wanted = hyper_attention(q, k, v, norm=norm, value_net=value_net, backend="reference")
    assert torch.equal(out.isnan(), wanted.isnan()) and out.isnan().any()


def test_large_scores():
    """Nothing overflows, and the error is that of scores in float32, whose last bit here is worth 1e-5 and more."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 33, 4) for _ in range(4))
    for norm in NORMS:
        options = {"norm": norm, "value_net": "silu"}
        actual = run(10 * q, 10 * k, v, grad, **options)
        wanted = run(*(t.double() for t in (10 * q, 10 * k, v, grad)), backend="reference", **options)
        for result, exact in zip(actual, wanted, strict=True):
            assert relative_error(result, exact) <= 1e-3
        assert all(result.isfinite().all() for result in run(1e4 * q, 1e4 * k, v, grad, **options))


@pytest.mark.parametrize("backend", ["cpu", "chunked"])
@pytest.mark.parametrize("value_net", NETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rms_head_over_one_head_keeps_the_little_gradient_that_is_left(dtype, value_net, backend):
    """s/√(s² + ε) hardly depends on s, and a difference of its gradient's two terms would be rounding alone."""
    torch.manual_seed(0)
    q, k = torch.rand(2, 1, 9, 4) + 0.5, torch.rand(2, 1, 9, 4) + 0.5
    v, grad, band = torch.randn(2, 1, 9, 4), torch.randn(2, 1, 9, 4), torch.rand(1, 17)
    options = {"norm": "rms_head", "value_net": value_net, "dropout": 0.3, "dropout_seed": 5, "causal": True}
    tensors = [t.to(dtype) for t in (q, k, v, grad, band)]
    exact = [t.double() for t in (q, k, v, grad, band)]
    actual = run(*tensors[:4], backend=backend, relative_bias=tensors[4], **options)
    wanted = run(*exact[:4], backend="reference", relative_bias=exact[4], **options)
    assert 0 < size(wanted[1]) < 1e-4
    for result, right in zip(actual, wanted, strict=True):
        assert relative_error(result, right, floor=0.0) <= (1e-5 if dtype == torch.float32 else 1e-8)


@pytest.mark.parametrize("width", [3, 4, 8])
@pytest.mark.parametrize("norm", NORMS)
def test_layouts_do_not_matter(norm, width):
    """Views of a fused projection, heads apart, lengths apart, gradients that are expanded from one number."""
    torch.manual_seed(0)
    projection = torch.randn(2, 37, 3 * 4 * width)
    q, k, v = (part.unflatten(-1, (4, width)).transpose(1, 2) for part in projection.chunk(3, -1))
    grad = torch.ones(()).expand(2, 4, 37, width)
    wanted = run(q.contiguous(), k.contiguous(), v.contiguous(), grad.contiguous(), norm=norm)
    for arrange in (lambda t: t, lambda t: t.mT.contiguous().mT, lambda t: torch.stack((t, t), -1)[..., 0]):
        for actual, exact in zip(run(arrange(q), arrange(k), arrange(v), grad, norm=norm), wanted, strict=True):
            assert torch.equal(actual, exact)


@pytest.mark.parametrize("shape", [(5, 3, 40, 4), (1, 3, 400, 4), (64, 4, 20, 2)])
@pytest.mark.parametrize("norm", NORMS)
def test_bitwise_the_same_for_any_number_of_threads(norm, shape):
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(*shape) for _ in range(4))
    band = torch.randn(shape[1], 2 * shape[2] - 1, requires_grad=True)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3, 2):
            torch.set_num_threads(num_threads)
            inputs = [t.detach().requires_grad_() for t in (q, k, v)] + [band]
            out = hyper_attention(
                *inputs[:3], relative_bias=band, norm=norm, dropout=0.1, dropout_seed=1, backend="cpu"
            )
            results.append([out, *torch.autograd.grad(out, inputs, grad)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_nothing_to_do(sizes):
    batch, heads, queries, keys = sizes
    q, k, v = (
        torch.randn(batch, heads, queries, 2),
        torch.randn(batch, heads, keys, 2),
        torch.randn(batch, heads, keys, 3),
    )
    band = torch.randn(heads, max(queries + keys - 1, 0), requires_grad=True)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = hyper_attention(*inputs, relative_bias=band, backend="cpu")
    assert out.shape == (batch, heads, queries, 3) and (out == 0).all()
    for t, gradient in zip((*inputs, band), torch.autograd.grad(out.sum(), (*inputs, band)), strict=True):
        assert gradient.shape == t.shape and (gradient == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [8, 16, 17])
def test_softmax_by_torch_or_by_us_is_the_reference(width, causal):
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 19, width) for _ in range(4))
    options = {"norm": "softmax", "value_net": "linear", "causal": causal}
    wanted = run(*(t.double() for t in (q, k, v, grad)), backend="reference", **options)
    for actual, exact in zip(run(q, k, v, grad, **options), wanted, strict=True):
        assert relative_error(actual, exact) <= 1e-5


def test_what_torch_may_serve():
    q = torch.empty(2, 3, 5, 32)
    served = AttentionOptions(True, 0.5, "softmax", "linear", "sum", 0.0, 0, query_offset=0)
    problem = Problem.of(AttentionInputs(q, q, q), served)
    assert cpu.prefers_torch(problem)
    not_causal = replace(served, causal=False)
    for change in (
        {"options": replace(served, norm="rms_head")},
        {"options": replace(served, value_net="relu")},
        {"options": replace(served, dropout=0.1)},
        {"options": replace(served, query_offset=1)},
        {"qk_width": 8, "v_width": 8},
        {"v_width": 16},
        {"queries": 4},
        {"mask": "key_padding"},
        {"relative_bias": True},
    ):
        assert not cpu.prefers_torch(problem._replace(**change)), change
    assert cpu.prefers_torch(problem._replace(options=not_causal, queries=4))
