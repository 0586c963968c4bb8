"""Every wrong argument: one sentence that names it, says what was given and what is allowed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headcode.ops import NORMS, attention_codes, explain_backend, hyper_attention, linear_attention_recurrent


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
    ({"value_net": "elu"}, ValueError, "value_net must be one of linear, relu_value, deep_linear, relu"),
    ({"pooling": "min"}, ValueError, "pooling must be one of sum, mean, sqrt, max, got 'min'"),
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


SIZE = st.sampled_from([1, 2, 3, 5])
WRONG_SHAPE = st.lists(st.sampled_from([4, 6, 7]), min_size=1, max_size=5)  # sizes that no valid call here has
NOT_TENSORS = st.sampled_from([None, 3, "q", [1.0], {}])


@st.composite
def valid_calls(draw):
    """Arguments of a call that works."""
    batch, heads, queries, keys, qk_width = (draw(SIZE) for _ in range(5))
    value_net = draw(st.sampled_from(["linear", "relu", "swiglu", "tanh"]))
    v_width = 2 * draw(SIZE) if value_net == "swiglu" else draw(SIZE)
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))

    def broadcast(*shape):
        kept = [draw(st.sampled_from([1, size])) for size in shape]
        return torch.ones(kept[draw(st.integers(0, len(kept))) :])

    call = {
        "q": torch.ones(batch, heads, queries, qk_width, dtype=dtype),
        "k": torch.ones(batch, heads, keys, qk_width, dtype=dtype),
        "v": torch.ones(batch, heads, keys, v_width, dtype=dtype),
        "norm": draw(st.sampled_from(sorted(NORMS))),
        "value_net": value_net,
        "pooling": draw(st.sampled_from(["sum", "mean", "sqrt", "max"])),
        "backend": draw(st.sampled_from(["auto", "reference", "chunked"])),
        "dropout": draw(st.sampled_from([0.0, 0.3])),
        "dropout_seed": draw(st.none() | st.integers(0, 2**63 - 1)),
        "causal": draw(st.booleans()),
    }
    if draw(st.booleans()):
        call["mask"] = broadcast(batch, 1, queries, keys).to(draw(st.sampled_from([torch.bool, dtype])))
    if draw(st.booleans()):
        call["bias"] = broadcast(batch, heads, queries, keys).to(dtype)
    if draw(st.booleans()):
        call["relative_bias"] = torch.ones(heads, queries + keys - 1, dtype=dtype)
    return call


BREAKS = {
    "q": lambda draw, call: draw(NOT_TENSORS | WRONG_SHAPE.filter(lambda s: len(s) != 4).map(torch.ones)),
    "k": lambda draw, call: draw(NOT_TENSORS | WRONG_SHAPE.map(lambda s: torch.ones(s, dtype=call["q"].dtype))),
    "v": lambda draw, call: draw(
        st.sampled_from([3, "v"]) | WRONG_SHAPE.map(lambda s: torch.ones(s, dtype=call["q"].dtype))
    ),
    "mask": lambda draw, call: draw(
        st.sampled_from([3, "m", torch.ones(1).long(), torch.ones(1).half()])
        | WRONG_SHAPE.map(lambda s: torch.ones(s).bool())
    ),
    "bias": lambda draw, call: draw(
        st.sampled_from([3, torch.ones(1).long()]) | WRONG_SHAPE.map(lambda s: torch.ones(s, dtype=call["q"].dtype))
    ),
    "relative_bias": lambda draw, call: draw(
        st.sampled_from([3, torch.ones(1).long(), torch.ones(1, 0, dtype=call["q"].dtype)])
    ),
    "norm": lambda draw, call: draw(st.none() | st.text() | st.just(3)),
    "value_net": lambda draw, call: draw(st.none() | st.text() | st.just(3)),
    "pooling": lambda draw, call: draw(st.none() | st.text()),
    "backend": lambda draw, call: draw(st.none() | st.text()),
    "dropout": lambda draw, call: draw(st.sampled_from([-0.1, 1.0, 2, math.nan, math.inf, "x", None, True])),
    "dropout_seed": lambda draw, call: draw(st.sampled_from([-1, 2**63, 0.5, "x", True])),
    "causal": lambda draw, call: draw(st.sampled_from([0, 1, "yes", None])),
    "scale": lambda draw, call: draw(st.sampled_from([math.nan, math.inf, "x", True])),
    "query_offset": lambda draw, call: draw(st.sampled_from([0.5, "x", True])),
}


@settings(max_examples=150, deadline=None)
@given(call=valid_calls())
def test_valid_calls_work(call):
    q, v = call["q"], call["v"]
    out = hyper_attention(**call)
    assert out.shape == (*q.shape[:3], v.shape[3] // 2 if call["value_net"] == "swiglu" else v.shape[3])
    assert out.isfinite().all()


@settings(max_examples=400, deadline=None)
@given(call=valid_calls(), name=st.sampled_from(sorted(BREAKS)), data=st.data())
def test_one_wrong_argument_is_named(call, name, data):
    broken = {**call, name: BREAKS[name](data.draw, call)}
    with pytest.raises((ValueError, TypeError)) as caught:
        hyper_attention(broken.pop("q"), broken.pop("k"), broken.pop("v"), **broken)
    message = str(caught.value)
    # A wrong q may show first as a k that does not match it.
    names = {"q": ("q", "k")}.get(name, (name,))
    assert message.split()[0] in names and message.endswith(".") and "\n" not in message, message


def test_codes_and_recurrent_form_complain_too():
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    with pytest.raises(ValueError, match="norm must be one of"):
        attention_codes(q, k, norm="x")
    with pytest.raises(ValueError, match="k must have q's length 5, got 7"):
        linear_attention_recurrent(q, k, k)
    with pytest.raises(ValueError, match=r"of shape \(batch, heads, Dk, Dv\) = \(2, 3, 4, 4\)"):
        linear_attention_recurrent(q, q, q, state=torch.zeros(1))
    with pytest.raises(TypeError, match="v must have q's dtype"):
        linear_attention_recurrent(q, q, q.double())
    with pytest.raises(ValueError, match="q must have 4 axes"):
        linear_attention_recurrent(q[0], q[0], q[0])
    with pytest.raises(ValueError, match="scale must be a finite number"):
        linear_attention_recurrent(q, q, q, scale=math.nan)
    with pytest.raises(ValueError, match="chunk must be an integer, at least 1, got '2'"):
        linear_attention_recurrent(q, q, q, chunk="2")
