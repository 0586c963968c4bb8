"""A mixture of experts: each token its own few networks, all used alike, nothing dropped."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from headcode import ModelConfig, Transformer
from headcode.nn import GeluFeedForward, MixtureOfExperts, capture_routing, forward_flops, load_model, save_model
from headcode.nn.experts import Routing, balance_loss

DIM, E, K = 6, 5, 2
SIZES = {"input_dim": 5, "output_dim": 3, "max_length": 7, "dim": 12, "num_heads": 3, "qk_dim": 6, "v_dim": 9}
SIZES |= {"mlp_dim": 10, "num_experts": E}


def mixture(per_token=K):
    torch.manual_seed(0)
    return MixtureOfExperts([GeluFeedForward(DIM, 3, "reference") for _ in range(E)], DIM, per_token).double()


X = torch.randn(2, 7, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("per_token", [2, 3, E])
def test_each_token_is_mixed_from_the_experts_that_its_router_prefers(per_token):
    layer = mixture(per_token)
    expected = torch.zeros_like(X)
    for b in range(2):
        for t in range(7):
            preferences = layer.router.weight @ X[b, t]
            best = sorted(range(E), key=lambda e: -preferences[e])[:per_token]
            shares = torch.softmax(preferences[best], 0)
            for share, e in zip(shares, best, strict=True):
                expected[b, t] += share * layer.experts[e](X[b, t])
    torch.testing.assert_close(layer(X), expected)


def test_gradcheck():
    layer = mixture()
    names = [name for name, _ in layer.named_parameters()]

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    inputs = (X[0, :3].clone().requires_grad_(), *layer.parameters())
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs, atol=1e-4)


def test_a_token_does_not_depend_on_the_others():
    """Also where all of them prefer the same experts: there is no capacity that could be full."""
    layer = mixture()
    crowd = X[:1, :1].expand(1, 997, DIM)
    torch.testing.assert_close(layer(crowd), layer(X[:1, :1]).expand(1, 997, DIM))


def test_an_expert_without_tokens_has_gradients_of_zero():
    layer = mixture()
    layer(X[:1, :1]).sum().backward()
    unused = [expert for expert in layer.experts if expert.output_proj.bias.grad.abs().sum() == 0]
    assert len(unused) == E - K
    for expert in unused:
        assert all((parameter.grad == 0).all() for parameter in expert.parameters())


def test_transforms_and_compiled_graphs_compute_the_same():
    layer = mixture()
    each = torch.func.vmap(lambda token: layer(token[None])[0])(X.flatten(0, 1))
    torch.testing.assert_close(each.view_as(X), layer(X))
    torch._dynamo.reset()
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    plain = layer(y)
    torch.testing.assert_close(compiled, plain)
    compiled.sin().sum().backward()
    plain.sin().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_routings_are_captured_call_by_call_and_only_inside():
    model = Transformer(ModelConfig(**SIZES, share_layers=True))
    x = torch.randn(3, 7, 5)
    with capture_routing(model) as routings:
        model(x, queries=slice(-1, None))
    model(x)
    assert [tuple(routing.experts.shape) for routing in routings] == [(21, K), (3, K)]
    assert all(routing.probabilities.sum(1).allclose(torch.ones(1)) for routing in routings)
    best = routings[0].probabilities.argsort(1, descending=True)[:, :K]
    assert torch.equal(routings[0].experts, best)
    plain = Transformer(ModelConfig(**(SIZES | {"num_experts": 1})))
    words = "Transformer has no mixture of experts: make it with num_experts of 2"
    with pytest.raises(ValueError, match=words), capture_routing(plain):
        pass


def test_the_balance_loss_is_1_if_all_are_used_alike_and_more_otherwise():
    alike = Routing(torch.full((E, E), 1 / E), torch.tensor([[e, (e + 1) % E] for e in range(E)]))
    assert balance_loss([alike]).item() == pytest.approx(1.0)
    probabilities = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.1, 0.3]], requires_grad=True)
    routing = Routing(probabilities, torch.tensor([[0, 1], [0, 2]]))
    # Shares 1/2, 1/4, 1/4; mean probabilities 0.65, 0.15, 0.2.
    assert balance_loss([routing]).item() == pytest.approx(3 * (0.5 * 0.65 + 0.25 * 0.15 + 0.25 * 0.2))
    assert balance_loss([routing, alike]).item() == pytest.approx((1.2375 + 1) / 2)
    balance_loss([routing]).backward()
    assert torch.allclose(probabilities.grad, torch.tensor([[0.75, 0.375, 0.375]] * 2))


def test_initial_weights_follow_the_models_rules():
    torch.manual_seed(0)
    model = Transformer(ModelConfig(input_dim=5, output_dim=1, max_length=16, num_experts=4))
    layer = model.blocks[0].feedforward
    assert layer.router.bias is None
    assert layer.router.weight.var().item() == pytest.approx(1 / 128, rel=0.2)
    weights = torch.stack([expert.output_proj.weight for expert in layer.experts])
    assert weights.var().item() == pytest.approx(1 / 256, rel=0.05)
    assert len({expert.hidden_proj.weight[0, 0].item() for expert in layer.experts}) == 4
    assert all((expert.hidden_proj.bias == 0).all() for expert in layer.experts)


def test_swiglu_experts_and_both_ways_of_saving(tmp_path):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SIZES, feedforward="swiglu", experts_per_token=3)).eval()
    x = torch.randn(2, 7, 5)
    loaded = load_model(save_model(model, tmp_path))
    assert torch.equal(loaded(x), model(x)) and torch.equal(copy.deepcopy(model)(x), model(x))
    assert loaded.config == model.config
    assert all(isinstance(part, nn.Linear) for part in loaded.blocks[0].feedforward.experts[0].children())


@pytest.mark.parametrize("per_token", [2, 4])
@pytest.mark.parametrize("feedforward", ["gelu", "swiglu"])
def test_flops_are_torchs_count(per_token, feedforward):
    config = ModelConfig(**SIZES, feedforward=feedforward, experts_per_token=per_token, backend="reference")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        Transformer(config)(torch.randn(3, 7, 5), queries=slice(-2, None))
    assert counter.get_total_flops() == 3 * forward_flops(config, 7, slice(-2, None))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
        ({"experts_per_token": 6}, "experts_per_token must lie in 2..5, the number of experts, got 6"),
        ({"experts_per_token": 1}, "a softmax over one expert is 1 and teaches the router nothing"),
        ({"num_experts": 1, "experts_per_token": 3}, "experts_per_token=3 needs num_experts of 2 or more, got 1"),
        ({"num_experts": 2049}, "num_layers times num_experts must be at most 4,096, got 2 and 2,049"),
    ],
)
def test_bad_configs(changes, words):
    with pytest.raises(ValueError) as caught:
        ModelConfig(**(SIZES | changes))
    assert words in str(caught.value)
