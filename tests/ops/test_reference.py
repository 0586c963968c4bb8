"""The op's meaning: hand-computed values, masks, alignment, dropout, pooling."""

import math

import pytest
import torch
import torch.nn.functional as F

from headcode.ops import METHODS, NORMS, POOLINGS, VALUE_NETS, attention_codes, hyper_attention
from headcode.ops.dropout import keep_mask

B, H, TQ, TK, DK, DV = 2, 3, 5, 7, 4, 6


def tensors(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return draw(B, H, TQ, DK), draw(B, H, TK, DK), draw(B, H, TK, DV)


def middle_layer(value_net, heads=H, width=DV, dtype=torch.float64):
    """The middle layer (heads, width, width + 1) for the value nets that have one, else None."""
    if not VALUE_NETS[value_net].middle:
        return None
    generator = torch.Generator().manual_seed(5)
    return torch.randn(heads, width, width + 1, generator=generator, dtype=torch.float64).to(dtype)


def loop(q, k, v, norm, activation, visible, scale=None, bias=None, middle=None):
    """The definition with Python loops over pairs, written apart from the op."""
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    out = torch.zeros(q.shape[0], q.shape[1], q.shape[2], v.shape[3], dtype=q.dtype)
    for b in range(q.shape[0]):
        for i in range(q.shape[2]):
            seen = [j for j in range(k.shape[2]) if visible[b, i, j]]
            scores = {
                j: (q[b, :, i] * k[b, :, j]).sum(-1) * scale + (0 if bias is None else bias[:, i, j]) for j in seen
            }
            total = sum(torch.exp(s) for s in scores.values())
            for j in seen:
                s = scores[j]
                z = {
                    "softmax": torch.exp(s) / total,
                    "none": s,
                    "rms_head": s / torch.sqrt((s**2).mean() + 1e-6),
                    "softmax_head": torch.exp(s) / torch.exp(s).sum(),
                    "layer_head": (s - s.mean()) / torch.sqrt(((s - s.mean()) ** 2).mean() + 1e-6),
                }[norm]
                for h in range(q.shape[1]):
                    if activation is None:
                        out[b, h, i] += z[h] * v[b, h, j]
                        continue
                    hidden = activation((z[:, None] * v[b, :, j]).sum(0))
                    if middle is not None:
                        layer = (z[:, None, None] * middle).sum(0)
                        hidden = activation(layer[:, :-1] @ hidden + layer[:, -1])
                    out[b, h, i] += z[h] * hidden
    return out


ACTIVATIONS = {
    "linear": None,
    "relu_value": None,
    "relu_relu": lambda a: a.clamp(min=0),
    "deep_linear": lambda a: a,
    "relu": lambda a: a.clamp(min=0),
    "gelu": lambda a: 0.5 * a * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))),
    "silu": lambda a: a / (1 + torch.exp(-a)),
    "tanh": torch.tanh,
    "swiglu": lambda a: a[:3] / (1 + torch.exp(-a[:3])) * a[3:],
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("value_net", VALUE_NETS)
def test_equals_the_definition(norm, value_net):
    q, k, v = tensors()
    mask = torch.rand(B, 1, TQ, TK, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[1, 0, 2] = False  # a query that sees nothing
    bias = torch.randn(H, TQ, TK, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    visible = mask[:, 0] & (torch.arange(TK) <= torch.arange(TQ)[:, None] + TK - TQ)
    if value_net == "swiglu":
        expected = loop(q, k, torch.zeros(B, H, TK, 3, dtype=q.dtype), norm, None, visible)
        for b in range(B):
            one = [t[b : b + 1] for t in (q, k, v)]
            expected[b] = _swiglu_loop(*one, norm, visible[b : b + 1], bias)[0]
    else:
        values = v.clamp(min=0) if value_net == "relu_value" else v
        middle = middle_layer(value_net)
        expected = loop(q, k, values, norm, ACTIVATIONS[value_net], visible, bias=bias, middle=middle)
    options = {"norm": norm, "value_net": value_net, "middle": middle_layer(value_net)}
    actual = hyper_attention(q, k, v, mask=mask, bias=bias, causal=True, **options, backend="reference")
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    assert (actual[1, :, 2] == 0).all()


def _swiglu_loop(q, k, v, norm, visible, bias):
    """v has 6 channels: gate (3) and signal (3); the output has 3."""
    codes = torch.zeros(1, H, TQ, TK, dtype=q.dtype)
    eye = torch.zeros(1, H, TK, TK, dtype=q.dtype)
    eye[:, :] = torch.eye(TK, dtype=q.dtype)
    codes[:] = loop(q, k, eye, norm, None, visible, bias=bias)  # a linear net over unit values reads the codes out
    out = torch.zeros(1, H, TQ, 3, dtype=q.dtype)
    for i in range(TQ):
        for j in range(TK):
            hidden = ACTIVATIONS["swiglu"]((codes[0, :, i, j, None] * v[0, :, j]).sum(0))
            out[0, :, i] += codes[0, :, i, j, None] * hidden
    return out


def test_hand_computed():
    # One query, one key, two heads: scores 3 and 4, so rms = sqrt(12.5).
    q = torch.tensor([3.0, 4.0], dtype=torch.float64).reshape(1, 2, 1, 1)
    k = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    v = torch.tensor([1.0, -2.0], dtype=torch.float64).reshape(1, 2, 1, 1)
    rms = math.sqrt(12.5 + 1e-6)
    codes = attention_codes(q, k)
    torch.testing.assert_close(codes.flatten(), torch.tensor([3 / rms, 4 / rms], dtype=torch.float64))
    hidden = 3 / rms - 8 / rms  # negative, so ReLU shuts the pair's network
    assert hyper_attention(q, k, v).abs().max() == 0
    deep = hyper_attention(q, k, v, value_net="deep_linear")
    torch.testing.assert_close(deep.flatten(), torch.tensor([3 / rms * hidden, 4 / rms * hidden], dtype=torch.float64))


def test_softmax_linear_is_torch_attention():
    q, k, v = tensors(torch.float32)
    mask = torch.rand(B, 1, TQ, TK) > 0.2
    mask[..., 0] = True
    ours = hyper_attention(q, k, v, mask=mask, norm="softmax", value_net="linear", backend="reference")
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("norm", NORMS)
class TestMasks:
    def call(self, norm, backend, **options):
        q, k, v = tensors()
        return hyper_attention(q, k, v, norm=norm, backend=backend, **options)

    def test_boolean_true_means_keep_and_float_is_added(self, norm, backend):
        keep = torch.rand(B, 1, TQ, TK, generator=torch.Generator().manual_seed(3)) > 0.4
        additive = torch.zeros(B, 1, TQ, TK, dtype=torch.float64).masked_fill(~keep, -math.inf)
        torch.testing.assert_close(self.call(norm, backend, mask=keep), self.call(norm, backend, mask=additive))
        shift = torch.randn(TQ, TK, dtype=torch.float64)
        torch.testing.assert_close(self.call(norm, backend, mask=shift), self.call(norm, backend, bias=shift))
        codes = attention_codes(*tensors()[:2], mask=keep, norm=norm)
        assert (codes.masked_select(~keep) == 0).all()

    def test_masking_equals_leaving_out(self, norm, backend):
        q, k, v = tensors()
        keep = torch.arange(TK) < 4
        short = hyper_attention(q, k[:, :, :4], v[:, :, :4], norm=norm, backend=backend)
        torch.testing.assert_close(self.call(norm, backend, mask=keep), short)

    @pytest.mark.parametrize("pooling", POOLINGS)
    def test_a_query_that_sees_nothing(self, norm, backend, pooling):
        keep = torch.ones(B, 1, TQ, TK, dtype=torch.bool)
        keep[0, 0, 3] = False
        q, k, v = (t.requires_grad_() for t in tensors())
        out = hyper_attention(q, k, v, mask=keep, norm=norm, pooling=pooling, backend=backend)
        assert (out[0, :, 3] == 0).all() and out.isfinite().all()
        out.sin().sum().backward()
        assert all(t.grad.isfinite().all() for t in (q, k, v))
        assert (q.grad[0, :, 3] == 0).all()

    def test_causal_aligns_the_last_query_with_the_last_key(self, norm, backend):
        keep = torch.arange(TK) <= torch.arange(TQ)[:, None] + (TK - TQ)
        torch.testing.assert_close(self.call(norm, backend, causal=True), self.call(norm, backend, mask=keep))
        shifted = torch.arange(TK) <= torch.arange(TQ)[:, None] + 1
        torch.testing.assert_close(
            self.call(norm, backend, causal=True, query_offset=1), self.call(norm, backend, mask=shifted)
        )

    def test_more_queries_than_keys(self, norm, backend):
        q, k, v = tensors()
        out = hyper_attention(k, q, v[:, :, :TQ], norm=norm, causal=True, backend=backend)  # 7 queries, 5 keys
        assert (out[:, :, :2] == 0).all() and (out[:, :, 2:].abs().sum(-1) > 0).any()

    def test_band_is_the_dense_bias_of_its_diagonals(self, norm, backend):
        band = torch.randn(H, TQ + TK - 1, dtype=torch.float64)
        dense = torch.empty(H, TQ, TK, dtype=torch.float64)
        for i in range(TQ):
            for j in range(TK):
                dense[:, i, j] = band[:, j - i + TQ - 1]
        torch.testing.assert_close(self.call(norm, backend, relative_bias=band), self.call(norm, backend, bias=dense))


@pytest.mark.parametrize("value_net", ["linear", "relu"])
def test_pooling(value_net):
    q, k, v = tensors()
    keep = torch.rand(B, 1, TQ, TK, generator=torch.Generator().manual_seed(4)) > 0.4
    keep[0, 0, 1] = False
    options = {"mask": keep, "value_net": value_net, "backend": "reference"}
    total = hyper_attention(q, k, v, **options)
    count = keep.sum(-1).clamp(min=1)[..., None]
    torch.testing.assert_close(hyper_attention(q, k, v, pooling="mean", **options), total / count)
    maximum = hyper_attention(q, k, v, pooling="max", **options)
    for b in range(B):
        for i in range(TQ):
            seen = [j for j in range(TK) if keep[b, 0, i, j]]
            each = [
                hyper_attention(
                    q[b : b + 1, :, i : i + 1],
                    k[b : b + 1, :, j : j + 1],
                    v[b : b + 1, :, j : j + 1],
                    value_net=value_net,
                )
                for j in seen
            ]
            expected = torch.stack(each).amax(0)[0, :, 0] if seen else torch.zeros(H, DV, dtype=q.dtype)
            torch.testing.assert_close(maximum[b, :, i], expected)


class TestDropout:
    def test_is_shared_by_batch_and_heads_and_scaled(self):
        # Codes of 1 everywhere: the sum over keys counts the kept ones.
        q = k = torch.ones(3, 2, 50, 1)
        v = torch.ones(3, 2, 50, 1)
        out = hyper_attention(q, k, v, norm="none", value_net="linear", dropout=0.25, dropout_seed=7)
        kept = keep_mask(0.25, 7, 50, 50, 0)
        torch.testing.assert_close(out, (kept.sum(-1) / 0.75).expand(3, 2, 50)[..., None].float())
        plain = hyper_attention(q, k, v, norm="none", value_net="deep_linear", dropout=0.25, dropout_seed=7)
        torch.testing.assert_close(plain, (kept.sum(-1) * 2 / 0.75**2).expand(3, 2, 50)[..., None].float())

    @pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
    def test_rate_and_independence(self, dropout):
        masks = torch.stack([keep_mask(dropout, seed, 101, 103, 0) for seed in range(20)]).float()
        sigma = math.sqrt(dropout * (1 - dropout))
        error = sigma / math.sqrt(masks.numel())
        assert abs(masks.mean() - (1 - dropout)) < 4 * error
        centred = (masks - (1 - dropout)) / sigma
        for a, b in [
            (centred[:, 1:], centred[:, :-1]),
            (centred[:, :, 1:], centred[:, :, :-1]),
            (centred[1:], centred[:-1]),
            (centred[:, 1:, 1:], centred[:, :-1, :-1]),
        ]:
            assert abs((a * b).mean()) < 4 / math.sqrt(a.numel())

    def test_mask_is_pinned(self):
        # Kernels in other languages repeat the hash; these bits may never change, or old runs stop being repeatable.
        bits = keep_mask(0.5, 2**40 + 3, 3, 8, 2).int().tolist()
        assert bits == PINNED

    def test_positions_not_indices(self):
        whole = keep_mask(0.3, 5, 10, 10, 0)
        assert torch.equal(keep_mask(0.3, 5, 3, 10, 7), whole[7:])
        _, k, v = tensors()
        full = hyper_attention(k, k, v, dropout=0.3, dropout_seed=5, backend="reference")
        last = hyper_attention(k[:, :, -2:], k, v, dropout=0.3, dropout_seed=5, backend="reference")
        torch.testing.assert_close(last, full[:, :, -2:])

    def test_seed_is_drawn_from_torch_unless_given(self):
        q, k, v = tensors()
        torch.manual_seed(3)
        first = hyper_attention(q, k, v, dropout=0.5)
        second = hyper_attention(q, k, v, dropout=0.5)
        torch.manual_seed(3)
        assert torch.equal(first, hyper_attention(q, k, v, dropout=0.5)) and not torch.equal(first, second)


PINNED = [[0, 1, 1, 1, 0, 1, 0, 0], [0, 1, 1, 1, 0, 1, 1, 0], [0, 0, 1, 0, 0, 1, 1, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("method", METHODS)
def test_half_precision_is_the_rounded_truth(dtype, backend, method):
    norm, value_net, _ = METHODS[method]
    inputs = [t.requires_grad_() for t in tensors(dtype)]
    options, middle = {"norm": norm, "value_net": value_net}, middle_layer(value_net, dtype=dtype)
    out = hyper_attention(*inputs, **options, middle=middle, backend=backend)
    middle = None if middle is None else middle.double()
    exact = hyper_attention(*(t.double() for t in inputs), **options, middle=middle, backend="reference")
    assert out.dtype == dtype
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out.double(), exact, **tolerance)
    out.float().sum().backward()
    assert all(t.grad.dtype == dtype and t.grad.isfinite().all() for t in inputs)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_empty_axes(backend, pooling):
    for shape in [(0, 3, 4), (2, 0, 4), (2, 3, 0)]:  # batch, queries, keys
        batch, queries, keys = shape
        q, k, v = torch.randn(batch, 2, queries, 3), torch.randn(batch, 2, keys, 3), torch.randn(batch, 2, keys, 5)
        out = hyper_attention(q, k, v, pooling=pooling, backend=backend)
        assert out.shape == (batch, 2, queries, 5) and (out == 0).all()


def test_a_new_norm_and_a_new_activation_are_one_entry_each(monkeypatch):
    from headcode.ops import Norm, ValueNet

    monkeypatch.setitem(NORMS, "abs_head", Norm(lambda s: s / (s.abs().sum(1, keepdim=True) + 1), "head"))
    monkeypatch.setitem(VALUE_NETS, "sine", ValueNet(torch.sin))
    inputs = [t.requires_grad_() for t in tensors()]
    results = []
    for backend in ("reference", "chunked"):
        out = hyper_attention(*inputs, norm="abs_head", value_net="sine", backend=backend)
        results.append((out, *torch.autograd.grad(out.cos().sum(), inputs)))
    for reference, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, reference)
