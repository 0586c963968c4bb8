"""Norms, value nets and the methods that pair them. Adding one is one entry here; every backend in torch reads it.

A norm or an activation is given by its function. Its derivative is optional: without one the chunked backend asks
torch for it, which is only slower.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

RMS_EPSILON = 1e-6
LAYER_EPSILON = 1e-6


class Norm(NamedTuple):
    """How scores (B, H, Tq, Tk) become codes."""

    function: Callable[[Tensor], Tensor]
    """scores -> codes. Masked pairs are set to 0 afterwards by the caller."""
    over: Literal["key", "head", "nothing"]
    """The axis that is mixed. Over keys, masked scores are -inf when the function sees them."""
    backward: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """(scores, codes, gradient of codes) -> gradient of scores."""


class ValueNet(NamedTuple):
    """What the code configures: one linear layer, or several with an activation between them."""

    activation: Callable[[Tensor], Tensor] | None
    """None: a single linear layer."""
    derivative: Callable[[Tensor], Tensor] | None = None
    gated: bool = False
    """v carries twice the channels, gate then signal; the hidden layer is activation(gate) * signal."""
    middle: bool = False
    """Three layers: a second hidden layer is generated from weights that the call must bring (`middle`)."""
    on_values: Callable[[Tensor], Tensor] | None = None
    """Of a linear net: applied to each head's values before the code weighs them."""


def _rms_scale(scores: Tensor) -> Tensor:
    return torch.rsqrt(scores.square().mean(1, keepdim=True) + RMS_EPSILON)


def _rms_head(scores: Tensor) -> Tensor:
    return scores * _rms_scale(scores)


def _rms_head_backward(scores: Tensor, codes: Tensor, grad: Tensor) -> Tensor:
    if scores.shape[1] == 1:  # 1 - codes² without the subtraction, which would leave rounding
        return grad * (RMS_EPSILON * _rms_scale(scores) ** 3)
    return _rms_scale(scores) * (grad - codes * (codes * grad).mean(1, keepdim=True))


def _layer_head(scores: Tensor) -> Tensor:
    centred = scores - scores.mean(1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + LAYER_EPSILON)


def _layer_head_backward(scores: Tensor, codes: Tensor, grad: Tensor) -> Tensor:
    scale = torch.rsqrt(scores.var(1, keepdim=True, correction=0) + LAYER_EPSILON)
    return scale * (grad - grad.mean(1, keepdim=True) - codes * (codes * grad).mean(1, keepdim=True))


def _softmax_backward(axis: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda scores, codes, grad: codes * (grad - (codes * grad).sum(axis, keepdim=True))


NORMS: dict[str, Norm] = {
    "softmax": Norm(lambda scores: torch.softmax(scores, -1), "key", _softmax_backward(-1)),
    "none": Norm(lambda scores: scores, "nothing", lambda scores, codes, grad: grad),
    "rms_head": Norm(_rms_head, "head", _rms_head_backward),
    "softmax_head": Norm(lambda scores: torch.softmax(scores, 1), "head", _softmax_backward(1)),
    "layer_head": Norm(_layer_head, "head", _layer_head_backward),
}


GELU_SLOPE = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


def gelu(x: Tensor) -> Tensor:
    """The tanh form, as everywhere in the paper's models."""
    return F.gelu(x, approximate="tanh")


def _gelu_derivative(x: Tensor) -> Tensor:
    tanh = torch.tanh(GELU_SLOPE * (x + GELU_CUBIC * x**3))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh.square()) * GELU_SLOPE * (1 + 3 * GELU_CUBIC * x.square())


def _silu_derivative(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1 + x * (1 - sigmoid))


VALUE_NETS: dict[str, ValueNet] = {
    "linear": ValueNet(None),
    "relu_value": ValueNet(None, on_values=torch.relu),
    "deep_linear": ValueNet(lambda x: x, torch.ones_like),
    "relu": ValueNet(torch.relu, lambda x: (x > 0).to(x.dtype)),
    "relu_relu": ValueNet(torch.relu, lambda x: (x > 0).to(x.dtype), middle=True),
    "gelu": ValueNet(gelu, _gelu_derivative),
    "silu": ValueNet(F.silu, _silu_derivative),
    "tanh": ValueNet(torch.tanh, lambda x: 1 - torch.tanh(x).square()),
    "swiglu": ValueNet(F.silu, _silu_derivative, gated=True),
}

POOLINGS = ("sum", "mean", "sqrt", "max")


class Method(NamedTuple):
    """A named (norm, value net) pair of the paper."""

    norm: str
    value_net: str
    authors_name: str | None
    """None: the paper has the model, and the authors' repository no name for it."""


METHODS: dict[str, Method] = {
    "softmax": Method("softmax", "linear", "softmax_attention"),
    "linear": Method("none", "linear", "linear_attention"),
    "linear_rms": Method("rms_head", "linear", "linear_attention_rms_head"),
    "linear_rms_relu_value": Method("rms_head", "relu_value", None),
    "hyla": Method("rms_head", "relu", "linear_hypatt"),
    "hyla_unnormed": Method("none", "relu", "linear_hypatt_no_rms_head"),
    "hyla_deep_linear": Method("rms_head", "deep_linear", "linear_hypatt_mlp_linear"),
    "hyla_deep_linear_unnormed": Method("none", "deep_linear", "linear_hypatt_mlp_linear_no_rms_head"),
    "softmax_hyla": Method("softmax", "relu", "softmax_hypatt"),
    "hyla_deeper": Method("rms_head", "relu_relu", None),
}
