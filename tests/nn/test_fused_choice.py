"""A block goes op by op where somebody looks into it or changes it, and where the kernels cannot do what is asked."""

import pytest
import torch
from torch import nn

from headcode import capture_codes
from headcode.nn import edit_codes
from headcode.nn import transformer as transformer_module
from tests.support.models import distance, exact, make


def hooked(model):
    model.blocks[0].feedforward.hidden_proj.register_forward_hook(lambda *arguments: None)
    model.blocks[1].attention.register_full_backward_hook(lambda *arguments: None)


def patched(model):
    for layer in model.blocks:
        layer.feedforward_norm.forward = lambda x: x


def replaced(model):
    class OtherLinear(nn.Linear):
        pass

    for layer in model.blocks:
        layer.attention.key_proj.__class__ = OtherLinear


def parametrised(model):
    for layer in model.blocks:
        torch.nn.utils.parametrize.register_parametrization(layer.attention.query_proj, "weight", nn.Identity())


def without_bias(model):
    for layer in model.blocks:
        layer.attention.output_proj.bias = None


@pytest.mark.parametrize("change", [hooked, patched, replaced, parametrised, without_bias])
def test_parts_that_are_watched_or_changed_are_used(change, fused):
    model = make(method="linear")
    change(model)
    model(torch.randn(2, 7, 5)).sum().backward()
    assert fused == [False, False]


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "reference"},
        {"backend": "chunked"},
        {"qk_norm": True},
        {"pooling": "max"},
        {"value_net": "swiglu"},
        {"norm": "softmax_head"},
        {"mlp_dim": 72},
        {"dim": 40},
        {"method": "linear", "causal": True, "recurrent": True, "position": "none"},
    ],
)
def test_what_the_kernels_do_not_know(changes, fused):
    make(**changes)(torch.randn(2, 7, 5)).sum().backward()
    assert fused == [False, False]


def test_codes_captured_and_edited(fused):
    model, x = make(method="hyla"), torch.randn(2, 7, 5)
    with capture_codes(model, detach=False) as codes:
        model(x)
    assert codes[1].shape == (2, 4, 7, 7)
    with edit_codes(model, lambda layer, codes: 0 * codes):
        model(x)
    assert fused == [False] * 4
    model(x)
    assert fused[4:] == [True, True]


def test_other_numbers_and_modes(fused):
    model, x = make(method="linear"), torch.randn(2, 7, 5)
    exact(model)(x.double())
    with torch.autocast("cpu", torch.float16):
        model(x)
    model.blocks[0](torch.randn(2, 48, 7, requires_grad=True).transpose(1, 2))
    hidden, ask = torch.randn(2, 7, 48), transformer_module.run_fused
    torch.func.grad(lambda h: h.sum() if ask(model.blocks[0], h, None, None) is None else h)(hidden)
    with torch.autograd.forward_ad.dual_level():
        ask(model.blocks[0], torch.autograd.forward_ad.make_dual(hidden, hidden), None, None)
    assert len(fused) == 7 and not any(fused)


def test_a_block_with_hooks_of_all_modules_is_not_fused(fused):
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    try:
        make()(torch.randn(2, 7, 5))
    finally:
        handle.remove()
    assert fused == [False, False]


def test_bad_queries_are_refused_in_the_same_words():
    layer = make().blocks[0]
    with pytest.raises(ValueError, match="queries must name at least one of 7 positions"):
        layer(torch.randn(2, 7, 48, requires_grad=True), queries=slice(5, 3))
    with pytest.raises(ValueError, match="dropout_seed must be from 0"):
        layer(torch.randn(2, 7, 48, requires_grad=True), dropout_seed=-1)
    with pytest.raises(RuntimeError, match="expected input with shape"):
        layer(torch.randn(2, 7, 47, requires_grad=True))


def test_compiled_models_trace_the_parts():
    model, x = make(method="linear", num_layers=1), torch.randn(2, 7, 5)
    expected = model(x).detach()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert distance(compiled(x).detach(), expected.double()) < 1e-5
