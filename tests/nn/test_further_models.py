"""The five models of Table A1 that the authors' repository lacks, against plain formulas: outputs, codes, gradients."""

import math

import pytest
import torch

from headcode import METHODS, HyperAttention, ModelConfig, Transformer, capture_codes, hyper_attention
from headcode.interop import load_reference, to_reference
from headcode.nn import forward_flops, generate, value_network, why_decoded_op_by_op, why_op_by_op
from headcode.ops import attention_codes, explain_backend
from tests.support.models import check_same_gradients, make

B, T, DIM, H, DV, E, K = 2, 7, 12, 3, 4, 5, 3
SIZES = {"input_dim": 5, "output_dim": 2, "max_length": T, "dim": DIM, "num_heads": H, "mlp_dim": 10, "num_layers": 2}
SIZES |= {"qk_dim": 2 * H, "v_dim": DV * H}
EXPERTS = {"num_experts": E, "experts_per_token": K}
MODELS = {name: {"method": name} for name in ("linear_rms_relu_value", "hyla_deeper")}
MODELS |= {f"{name} + MoE": {"method": name, **EXPERTS} for name in ("softmax", "linear", "hyla")}


def model_of(name, **changes):
    torch.manual_seed(3)
    model = Transformer(ModelConfig(**SIZES, **MODELS[name], **changes)).double()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms that are not 0 and 1
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return weight * centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-6) + bias


def bucket(distance, n=T):
    if distance < n // 2:
        return max(distance, 0)
    grown = math.log(distance / (n // 2) + torch.finfo(torch.float32).eps) / math.log(n / (n // 2)) * (n - n // 2)
    return min(n // 2 + int(grown), n - 1)


def plain_codes(p, at, x, norm, causal):
    """(B, query, key, H)"""
    q = (x @ p[at + "query_proj.weight"].T + p[at + "query_proj.bias"]).view(B, T, H, -1)
    k = (x @ p[at + "key_proj.weight"].T + p[at + "key_proj.bias"]).view(B, T, H, -1)
    s = (q[:, :, None] * k[:, None]).sum(-1) / math.sqrt(q.shape[-1])
    table = p[at + "relative_bias.table"]
    s = s + torch.stack([torch.stack([table[:, bucket(i - j)] for j in range(T)]) for i in range(T)])
    seen = torch.tensor([[j <= i or not causal for j in range(T)] for i in range(T)])[None, :, :, None]
    if norm == "softmax":
        powers = s.exp() * seen
        return powers / powers.sum(2, keepdim=True)
    if norm == "rms_head":
        s = s / torch.sqrt((s**2).mean(-1, keepdim=True) + 1e-6)
    return s * seen


def plain_attention(p, at, x, z, value_net):
    """Σ_k of the network that the code z[q, k] generates, applied to token k, pair by pair."""
    relu = lambda a: a.clamp(min=0)  # noqa: E731
    value, value_bias = p[at + "value_proj.weight"].view(H, DV, DIM), p[at + "value_proj.bias"].view(H, DV)
    output = p[at + "output_proj.weight"].view(DIM, H, DV)
    out = []
    for b in range(B):
        for i in range(T):
            total = p[at + "output_proj.bias"]
            for j in range(T):
                code, token = z[b, i, j], x[b, j]
                if value_net in ("linear", "relu_value"):
                    for h in range(H):
                        v = value[h] @ token + value_bias[h]
                        total = total + code[h] * (output[:, h] @ (relu(v) if value_net == "relu_value" else v))
                    continue
                u = relu(sum(code[h] * (value[h] @ token + value_bias[h]) for h in range(H)))
                if value_net == "relu_relu":
                    middle, bias = p[at + "middle_weight"], p[at + "middle_bias"]
                    u = relu(sum(code[h] * (middle[h] @ u + bias[h]) for h in range(H)))
                total = total + sum(code[h] * (output[:, h] @ u) for h in range(H))
            out.append(total)
    return torch.stack(out).view(B, T, DIM)


def plain_feedforward(p, at, x):
    def network(x, at):
        a = x @ p[at + "hidden_proj.weight"].T + p[at + "hidden_proj.bias"]
        a = 0.5 * a * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))
        return a @ p[at + "output_proj.weight"].T + p[at + "output_proj.bias"]

    if at + "router.weight" not in p:
        return network(x, at)
    out = []
    for token in x.reshape(-1, DIM):
        preferences = p[at + "router.weight"] @ token
        best = sorted(range(E), key=lambda e: -preferences[e].item())[:K]
        powers = [preferences[e].exp() for e in best]
        out.append(
            sum(a / sum(powers) * network(token, f"{at}experts.{e}.") for a, e in zip(powers, best, strict=True))
        )
    return torch.stack(out).view_as(x)


def plain_model(model, x):
    """Output and codes of every layer, from the definition."""
    p, config = dict(model.named_parameters()), model.config
    norm, value_net, _ = METHODS[config.method]
    hidden, codes = x @ p["embedding.weight"].T + p["embedding.bias"], []
    for index in range(config.num_layers):
        at = f"blocks.{index}."
        normed = layer_norm(hidden, p[at + "attention_norm.weight"], p[at + "attention_norm.bias"])
        codes.append(plain_codes(p, at + "attention.", normed, norm, config.causal))
        hidden = hidden + plain_attention(p, at + "attention.", normed, codes[-1], value_net)
        normed = layer_norm(hidden, p[at + "feedforward_norm.weight"], p[at + "feedforward_norm.bias"])
        hidden = hidden + plain_feedforward(p, at + "feedforward.", normed)
    normed = layer_norm(hidden, p["final_norm.weight"], p["final_norm.bias"])
    return normed @ p["output_proj.weight"].T + p["output_proj.bias"], codes


X = torch.randn(B, T, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_codes_and_gradients_are_those_of_the_definition(name, causal, backend):
    model = model_of(name, causal=causal, backend=backend)
    with capture_codes(model) as codes:
        output = model(X)
    expected, expected_codes = plain_model(model, X)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-9)
    for layer, wanted in enumerate(expected_codes):
        torch.testing.assert_close(codes[layer], wanted.permute(0, 3, 1, 2), rtol=0, atol=1e-9)
    weights = torch.linspace(0, 2, output.numel(), dtype=torch.float64).cos().view_as(output)
    parameters = dict(model.named_parameters())
    wanted = torch.autograd.grad((expected * weights).sum(), list(parameters.values()))
    found = torch.autograd.grad((output * weights).sum(), list(parameters.values()))
    for path, one, other in zip(parameters, found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=lambda words, path=path: f"{path}: {words}")


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck_of_the_deeper_layer(backend, bias):
    torch.manual_seed(0)
    layer = HyperAttention(5, 3, method="hyla_deeper", qk_dim=6, v_dim=6, bias=bias, backend=backend).double()
    if bias:
        torch.nn.init.normal_(layer.middle_bias)  # at 0, hidden units may stand where ReLU has its corner
    x = torch.randn(1, 3, 5, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x, *layer.parameters()))


def test_parameters_are_counted():
    """The first has as many as the others; the deeper one a (2, 2) matrix and 2 biases more for each head and layer."""
    sizes = {"input_dim": 5, "output_dim": 1, "max_length": 16}  # the paper's model of fuzzy logic
    counts = {}
    for method in METHODS:
        config = ModelConfig(method=method, **sizes)
        counts[method] = sum(parameter.numel() for parameter in Transformer(config).parameters())
        assert counts[method] == config.num_parameters
    assert counts.pop("hyla_deeper") == 151_009 + 2 * 8 * (2 * 2 + 2)
    assert set(counts.values()) == {151_009}
    for feedforward, size in (("gelu", 2 * 128 * 256 + 128 + 256), ("swiglu", 3 * 128 * 256)):
        config = ModelConfig(**sizes, feedforward=feedforward, num_experts=4)
        plain = config.replace(num_experts=1)
        assert config.num_parameters - plain.num_parameters == 2 * (3 * size + 4 * 128)
        assert sum(parameter.numel() for parameter in Transformer(config).parameters()) == config.num_parameters


def test_initial_weights_of_the_middle_layer():
    torch.manual_seed(0)
    layer = HyperAttention(16, 7, method="hyla_deeper", qk_dim=14, v_dim=7 * 23)
    assert layer.middle_weight.shape == (7, 23, 23) and (layer.middle_bias == 0).all()
    variance = 1 / (7 * 23)  # a unit is a sum over heads and channels
    assert layer.middle_weight.var().item() == pytest.approx(variance, rel=0.1)
    assert layer.middle_weight.abs().max() <= 2 * math.sqrt(variance) / 0.8796


def test_the_middle_layer_is_given_where_it_is_used_and_nowhere_else():
    q, k, v = (torch.randn(B, H, T, DV) for _ in range(3))
    middle = torch.randn(H, DV, DV + 1)
    for given, words in ((None, "got none"), (middle[:, :, 1:], r"got shape \(3, 4, 4\)")):
        for call in (hyper_attention, explain_backend):
            with pytest.raises(ValueError, match=rf"value_net='relu_relu' needs middle, .* = \(3, 4, 5\), {words}\.$"):
                call(q, k, v, value_net="relu_relu", middle=given)
    with pytest.raises(ValueError, match="middle is for value_net=relu_relu, and value_net is 'relu': leave it out"):
        hyper_attention(q, k, v, middle=middle)
    with pytest.raises(TypeError, match="middle must have q's dtype float32, got float64"):
        hyper_attention(q, k, v, value_net="relu_relu", middle=middle.double())
    with pytest.raises(ValueError, match="backend 'cpu' cannot serve this call: it has the value nets linear"):
        hyper_attention(q, k, v, value_net="relu_relu", middle=middle, backend="cpu")


def test_which_path_serves_is_said():
    q, k, v = (torch.randn(B, H, T, DV) for _ in range(3))
    choice = explain_backend(q, k, v, norm="rms_head", value_net="relu_value")
    assert choice.name == explain_backend(q, k, v, norm="rms_head", value_net="linear").name
    large = torch.randn(1, 1, 2**12, 2)
    middle = torch.randn(1, 2, 3)
    choice = explain_backend(large, large, large, value_net="relu_relu", middle=middle)
    assert choice.name == "chunked" and "the reference would hold 100663296 numbers" in choice.reason
    x = torch.randn(2, 13, 48)
    for changes, words in (
        ({"method": "hyla_deeper"}, "value net 'relu_relu'"),
        ({"num_experts": 3}, "feedforward is a headcode.nn.experts.MixtureOfExperts"),
    ):
        assert words in why_op_by_op(make(**changes).blocks[0], x)
        decoder = make(vocab_size=17, input_dim=None, output_dim=None, causal=True, **changes).eval()
        assert words in why_decoded_op_by_op(decoder)


def test_relu_on_the_values_is_shared_by_dropout_and_pooling():
    """Whatever else a call asks for, it is the linear net over max(v, 0)."""
    q, k, v = (torch.randn(B, H, T, DV, dtype=torch.float64) for _ in range(3))
    for options in ({"dropout": 0.3, "dropout_seed": 5}, {"pooling": "max"}, {"pooling": "mean", "causal": True}):
        found = hyper_attention(q, k, v, value_net="relu_value", **options)
        assert torch.equal(found, hyper_attention(q, k, v.clamp(min=0), value_net="linear", **options))


def test_dropout_of_the_deeper_network_is_that_of_every_backend():
    """The mask multiplies the codes, and so all three generated layers."""
    q, k, v = (torch.randn(B, H, T, DV, dtype=torch.float64) for _ in range(3))
    middle = torch.randn(H, DV, DV + 1, dtype=torch.float64)
    ones = torch.ones(1, 1, T, 1, dtype=torch.float64)
    scale = hyper_attention(
        ones,
        ones,
        torch.eye(T, dtype=torch.float64)[None, None],
        norm="none",
        value_net="linear",
        scale=1.0,
        dropout=0.4,
        dropout_seed=9,
    )[0, 0]  # what dropout multiplies the code of (query, key) by
    codes = attention_codes(q, k, norm="softmax") * scale
    u = torch.einsum("bhqk,bhkd->bqkd", codes, v).relu()
    u = (
        torch.einsum("bhqk,hed,bqkd->bqke", codes, middle[..., :-1], u)
        + torch.einsum("bhqk,he->bqke", codes, middle[..., -1])
    ).relu()
    expected = torch.einsum("bhqk,bqkd->bhqd", codes, u)
    for backend in ("reference", "chunked"):
        found = hyper_attention(
            q, k, v, norm="softmax", value_net="relu_relu", middle=middle, dropout=0.4, dropout_seed=9, backend=backend
        )
        torch.testing.assert_close(found, expected)
    assert (scale == 0).any()


@pytest.mark.parametrize("name", MODELS)
def test_parts_of_the_outputs_are_those_of_the_whole(name):
    model = model_of(name, attention_dropout=0.2)
    whole, part = model(X, dropout_seed=3)[:, 2:4], model(X, dropout_seed=3, queries=slice(2, 4))
    check_same_gradients(part, whole, list(model.parameters()))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("position", ["relative", "rotary"])
def test_decoding_with_a_cache(name, position):
    sizes = SIZES | {"input_dim": None, "output_dim": None, "vocab_size": 11, "position": position, "causal": True}
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**(sizes | MODELS[name]))).double().eval()
    tokens = torch.randint(11, (2, T))
    whole, cache = model(tokens), model.new_cache()
    with torch.no_grad():
        pieces = [model(tokens[:, a:b], cache=cache) for a, b in [(0, 3), (3, 4), (4, 7)]]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert len(list(generate(model, [1, 2], 3, temperature=0))) == 3


def test_the_deeper_layer_is_the_sum_of_its_generated_networks():
    model = model_of("hyla_deeper")
    layer, x = model.blocks[0].attention, torch.randn(B, T, DIM, dtype=torch.float64)
    with capture_codes(layer) as codes:
        output = layer(x)
    networks = value_network(layer, codes[0])
    shapes = [tuple(weight.shape[3:]) for weight in networks.weights]
    assert shapes == [(DV, DIM), (DV, DV), (DIM, DV)]
    rebuilt = networks(x[:, None]).sum(2) + layer.output_proj.bias
    torch.testing.assert_close(rebuilt, output, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_the_authors_have_no_parameters_for_these(name):
    with pytest.raises(ValueError, match=r"^The authors' (code has no method|repository has no parameters of)"):
        to_reference(model_of(name))
    with pytest.raises(ValueError, match="method must be one of"):
        load_reference(to_reference(Transformer(ModelConfig(**SIZES))), method="None")


@pytest.mark.parametrize("method", ["linear_rms_relu_value", "hyla_deeper"])
def test_flops_are_torchs_count(method):
    from torch.utils.flop_counter import FlopCounterMode

    for changes in ({}, {"num_experts": 1}):
        model = Transformer(ModelConfig(**SIZES, method=method, backend="reference", **changes)).double()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(X)
        assert counter.get_total_flops() == B * forward_flops(model.config, T)
