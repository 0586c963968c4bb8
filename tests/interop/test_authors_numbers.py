"""The authors' own numbers: every output, code and gradient of 16 models, path by path."""

import json

import numpy as np
import pytest
import torch

from headcode import METHODS, ModelConfig, Transformer, capture_codes
from headcode.interop import load_reference, to_reference
from tests.support import GOLDENS

CASES = json.loads((GOLDENS / "transformer_a.json").read_text())
METHOD_OF = {method.authors_name: name for name, method in METHODS.items() if method.authors_name}


@pytest.fixture(scope="module")
def goldens():
    with np.load(GOLDENS / "transformer_a.npz") as file:
        return dict(file)


def part(goldens, case, kind):
    prefix = f"{case['name']}:{kind}:"
    return {name.removeprefix(prefix): array for name, array in goldens.items() if name.startswith(prefix)}


def run(goldens, case, dtype):
    model = load_reference(part(goldens, case, "param"), method=METHOD_OF[case["mixer"]], causal=case["causal"])
    model = model.to(dtype)
    with capture_codes(model) as codes:
        y = model(torch.from_numpy(goldens[f"{case['name']}:x"]).to(dtype))
    y.sin().sum().backward()
    return y.detach().double().numpy(), codes, to_reference(model, gradients=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
@pytest.mark.parametrize(
    ("dtype", "forward_tolerance", "gradient_tolerance"), [(torch.float64, 1e-9, 1e-6), (torch.float32, 1e-5, 5e-5)]
)
def test_authors_numbers(goldens, case, dtype, forward_tolerance, gradient_tolerance):
    y, codes, gradients = run(goldens, case, dtype)
    np.testing.assert_allclose(y, goldens[f"{case['name']}:y"], rtol=0, atol=forward_tolerance)
    expected_codes = part(goldens, case, "code")
    assert sorted(codes) == list(range(case["L"])) and len(expected_codes) == case["L"]
    for layer, code in codes.items():
        expected = expected_codes[f"transformer_block_{layer}"]
        np.testing.assert_allclose(code.double().numpy(), expected, rtol=0, atol=forward_tolerance)
    expected_gradients = part(goldens, case, "grad")
    assert gradients.keys() == expected_gradients.keys()
    norm = np.sqrt(sum(np.square(g).sum() for g in expected_gradients.values()))
    for path, expected in expected_gradients.items():
        error = np.linalg.norm(gradients[path].astype(np.float64) - expected) / norm
        assert error <= gradient_tolerance, f"{path}: {error}"


def test_all_eight_methods_are_covered():
    assert {(METHOD_OF[case["mixer"]], case["causal"]) for case in CASES} == {
        (method, causal) for method in METHOD_OF.values() for causal in (False, True)
    }


@pytest.mark.parametrize("options", [{}, {"feedforward": "swiglu", "position": "none"}, {"share_layers": True}])
@pytest.mark.parametrize("tokens", [False, True])
def test_a_model_survives_the_authors_parameters_and_back(options, tokens, tmp_path):
    size = {"vocab_size": 11} if tokens else {"input_dim": 5, "output_dim": 3}
    config = ModelConfig(
        max_length=7, dim=12, num_layers=3, num_heads=2, qk_dim=6, v_dim=10, mlp_dim=13, **size, **options
    )
    model = Transformer(config)
    params = to_reference(model)
    assert sum(a.size for a in params.values()) == sum(p.numel() for p in model.parameters())
    np.savez(tmp_path / "params.npz", **params)
    num_layers = 3 if config.share_layers else None
    again = load_reference(tmp_path / "params.npz", method="linear_hypatt", num_layers=num_layers)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name]), name
    x = torch.randint(11, (2, 7)) if tokens else torch.randn(2, 7, 5)
    assert torch.equal(model(x), again(x))


@pytest.mark.parametrize(
    "options",
    [
        {"position": "sinusoidal"},
        {"value_net": "gelu"},
        {"value_net": "swiglu"},
        {"pooling": "mean"},
        {"qk_norm": True},
    ],
)
def test_what_the_layout_cannot_carry_is_refused(options):
    config = ModelConfig(input_dim=5, output_dim=3, max_length=7, **options)
    with pytest.raises(ValueError, match="The authors'"):
        to_reference(Transformer(config))


def test_half_precision_and_tensors_pass_through():
    params = {path: torch.from_numpy(array).bfloat16().requires_grad_() for path, array in small_params().items()}
    model = load_reference(params)
    assert model.embedding.weight.dtype == torch.float32
    again = to_reference(model.bfloat16())
    assert all(np.array_equal(again[path], value.detach().float().numpy()) for path, value in params.items())


def small_params():
    config = ModelConfig(input_dim=5, output_dim=3, max_length=7, dim=12, num_layers=2, num_heads=2, mlp_dim=13)
    return to_reference(Transformer(config))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.pop("embedding/kernel"), "lack embedding/kernel"),
        (lambda p: p.pop("decoder_norm/scale"), "lack decoder_norm/scale"),
        (lambda p: p.update({"extra/thing": np.zeros(3)}), "extra/thing"),
        (lambda p: p.update({"logitdense/bias": np.zeros(4)}), "logitdense/bias must have shape"),
        (lambda p: p.update({"logitdense/bias": np.zeros(3, int)}), "floating-point"),
        (lambda p: [p.pop(k) for k in list(p) if "block_0" in k], "transformer_block_0"),
        (lambda p: [p.pop(k) for k in list(p) if "block" in k], "transformer_block_0"),
    ],
)
def test_bad_parameters_are_named(change, words):
    params = small_params()
    change(params)
    with pytest.raises(ValueError, match=words):
        load_reference(params)


def test_bad_method_and_pickles_are_refused(tmp_path):
    with pytest.raises(ValueError, match="method must be one of softmax, linear"):
        load_reference(small_params(), method="hula")
    with pytest.raises(TypeError, match="mapping"):
        load_reference(3)
    np.savez(tmp_path / "evil.npz", thing=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="not an .npz file of arrays"):
        load_reference(tmp_path / "evil.npz")
