"""Every wrong argument: one sentence that names it, says what was given and what is allowed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headcode.ops import attention_codes, explain_backend, hyper_attention, linear_attention_recurrent


def good():
    return {"q": torch.randn(2, 3, 5, 4), "k": torch.randn(2, 3, 7, 4), "v": torch.randn(2, 3, 7, 6)}


BAD = [
    ({"q": torch.randn(3, 5, 4)}, ValueError, "q must have 4 axes (batch, head, length, dim), got shape (3, 5, 4)"),
    ({"k": torch.randn(2, 3, 7, 5)}, ValueError, "k must have q's batch, heads and width"),
    ({"k": torch.randn(2, 4, 7, 4)}, ValueError, "k must have q's batch, heads and width"),
    ({"v": torch.randn(2, 3, 6, 6)}, ValueError, "v must have k's batch, heads and length"),
    ({"v": torch.randn(2, 3, 7, 0)}, ValueError, "v must have width at least 1"),
    ({"v": torch.randn(2, 3, 7, 3), "value_net": "swiglu"}, ValueError, "v must have an even width"),
    ({"k": torch.randn(2, 3, 7, 4).double()}, TypeError, "k must have q's dtype float32, got float64"),
    ({"v": torch.randn(2, 3, 7, 6).half()}, TypeError, "v must have q's dtype float32, got float16"),
    ({"q": torch.ones(2, 3, 5, 4).long()}, TypeError, "q must be float32, float64, bfloat16 or float16, got int64"),
    ({"q": [1, 2]}, TypeError, "q must be a torch.Tensor, got list"),
    ({"k": None}, TypeError, "k must be a torch.Tensor, got NoneType"),
    ({"v": torch.randn(2, 3, 7, 6, device="meta")}, ValueError, "v must be on q's device cpu, got meta"),
    ({"mask": torch.ones(5, 7).int()}, TypeError, "mask must be boolean (True means keep) or have q's dtype"),
    ({"mask": torch.ones(5, 7).double()}, TypeError, "mask must be boolean (True means keep) or have q's dtype"),
    ({"mask": torch.ones(7, 5).bool()}, ValueError, "mask must be broadcastable to (2, 1, 5, 7)"),
    ({"mask": torch.ones(2, 3, 5, 7).bool()}, ValueError, "masks are shared by the heads"),
    ({"mask": True}, TypeError, "mask must be a torch.Tensor, got bool"),
    ({"bias": torch.ones(4, 5, 7)}, ValueError, "bias must be broadcastable to (2, 3, 5, 7)"),
    ({"bias": torch.ones(1, 2, 3, 5, 7)}, ValueError, "bias must be broadcastable to (2, 3, 5, 7)"),
    ({"relative_bias": torch.ones(3, 12)}, ValueError, "relative_bias must have shape (heads, queries + keys - 1)"),
    ({"relative_bias": torch.ones(3, 11).double()}, TypeError, "relative_bias must have q's dtype float32"),
    ({"norm": "rms"}, ValueError, "norm must be one of softmax, none, rms_head"),
    ({"norm": None}, ValueError, "norm must be one of softmax, none, rms_head"),
    ({"value_net": "elu"}, ValueError, "value_net must be one of linear, deep_linear, relu"),
    ({"pooling": "min"}, ValueError, "pooling must be one of sum, mean, max, got 'min'"),
    ({"backend": "cuda"}, ValueError, "backend must be one of auto"),
    ({"backend": None}, ValueError, "backend must be one of auto"),
    ({"scale": math.nan}, ValueError, "scale must be a finite number, got nan"),
    ({"scale": "big"}, TypeError, "scale must be a number, got 'big'"),
    ({"dropout": 1.0}, ValueError, "dropout must be at least 0 and below 1, got 1.0"),
    ({"dropout": math.nan}, ValueError, "dropout must be at least 0 and below 1, got nan"),
    ({"dropout": 0.1, "dropout_seed": -1}, ValueError, "dropout_seed must be from 0 to 2**63 - 1, got -1"),
    ({"dropout": 0.1, "dropout_seed": 1.5}, TypeError, "dropout_seed must be an integer, got 1.5"),
    ({"causal": 1}, TypeError, "causal must be True or False, got 1"),
    ({"query_offset": 0.5}, TypeError, "query_offset must be an integer, got 0.5"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD, ids=[str(sorted(change)) for change, _, _ in BAD])
def test_named_complaints(change, error, words):
    arguments = {**good(), **change}
    for function in (hyper_attention, explain_backend):
        with pytest.raises(error) as caught:
            function(
                arguments["q"], arguments["k"], arguments["v"], **{k: v for k, v in arguments.items() if k not in "qkv"}
            )
        assert words in str(caught.value)
        assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


SIZE = st.integers(0, 3)


@settings(max_examples=300, deadline=None)
@given(
    shapes=st.lists(st.lists(SIZE, min_size=0, max_size=5), min_size=3, max_size=3),
    mask=st.none() | st.lists(SIZE, max_size=5),
    mask_kind=st.sampled_from([torch.bool, torch.float32, torch.int64]),
    bias=st.none() | st.lists(SIZE, max_size=5),
    band=st.none() | st.lists(SIZE, max_size=3),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.float64, torch.int64]), min_size=3, max_size=3),
    norm=st.sampled_from(["softmax", "rms_head", "nonsense"]),
    value_net=st.sampled_from(["linear", "swiglu", "relu", "nonsense"]),
    backend=st.sampled_from(["auto", "reference", "chunked", "nonsense"]),
    dropout=st.floats(-1, 2) | st.just(math.nan),
)
def test_any_input_works_or_is_refused_in_a_sentence(
    shapes, mask, mask_kind, bias, band, dtypes, norm, value_net, backend, dropout
):
    q, k, v = (torch.ones(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    try:
        out = hyper_attention(
            q,
            k,
            v,
            mask=None if mask is None else torch.ones(mask).to(mask_kind),
            bias=None if bias is None else torch.ones(bias),
            relative_bias=None if band is None else torch.ones(band),
            norm=norm,
            value_net=value_net,
            backend=backend,
            dropout=dropout,
        )
    except (ValueError, TypeError) as error:
        assert str(error).endswith(".") and "\n" not in str(error), error
        assert any(name in str(error) for name in ("q", "k", "v", "mask", "bias", "norm", "value_net", "dropout"))
    else:
        assert out.shape[:3] == q.shape[:3] and out.isfinite().all()


def test_codes_and_recurrent_form_complain_too():
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    with pytest.raises(ValueError, match="norm must be one of"):
        attention_codes(q, k, norm="x")
    with pytest.raises(ValueError, match="same batch, heads and length"):
        linear_attention_recurrent(q, k, k)
    with pytest.raises(ValueError, match=r"state must have shape \(batch, heads, Dk, Dv\) = \(2, 3, 4, 4\)"):
        linear_attention_recurrent(q, q, q, state=torch.zeros(1))
