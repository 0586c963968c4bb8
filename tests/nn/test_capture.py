"""capture_codes: exact, by position, on every backend, differentiable on request."""

import pytest
import torch

from headcode import METHODS, HyperAttention, ModelConfig, Transformer, capture_codes


def model(**options):
    torch.manual_seed(0)
    sizes = {
        "input_dim": 5,
        "output_dim": 3,
        "max_length": 7,
        "dim": 12,
        "num_heads": 3,
        "qk_dim": 6,
        "v_dim": 9,
        "mlp_dim": 8,
    }
    return Transformer(ModelConfig(**{**sizes, "num_layers": 3, **options})).double().eval()


X = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", [False, True])
def test_every_backend_and_any_positions(method, causal):
    captured = {}
    for backend in ("reference", "chunked", "auto"):
        transformer = model(method=method, causal=causal, backend=backend)
        with capture_codes(transformer) as codes:
            transformer(X)
        captured[backend] = codes
    assert sorted(captured["auto"]) == [0, 1, 2]
    for layer in range(3):
        full = captured["reference"][layer]
        assert full.shape == (2, 3, 7, 7) and not full.requires_grad
        for backend in ("chunked", "auto"):
            torch.testing.assert_close(captured[backend][layer], full)
    with capture_codes(transformer, layers=[-1], queries=slice(-4, None), keys=[0, 5]) as codes:
        transformer(X)
    assert list(codes) == [2]
    torch.testing.assert_close(codes[2], captured["reference"][2][:, :, 3:, [0, 5]])


def test_positions_survive_pruned_queries():
    transformer = model()
    with capture_codes(transformer) as every:
        transformer(X)
    with capture_codes(transformer, queries=-1) as codes:
        out = transformer(X, queries=slice(-2, None))
    assert out.shape == (2, 2, 3) and codes[2].shape == (2, 3, 1, 7)
    for layer in range(3):
        torch.testing.assert_close(codes[layer], every[layer][:, :, -1:])
    with (
        pytest.raises(ValueError, match="queries must be positions from 5 to 6, got 0"),
        capture_codes(transformer, queries=0),
    ):
        transformer(X, queries=slice(-2, None))


def test_padding_gives_zero_codes():
    transformer = model()
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    with capture_codes(transformer) as codes:
        transformer(X, key_padding_mask=padding)
    assert (codes[1][1, :, :, 5:] == 0).all() and (codes[1][0, :, :, 5:] != 0).all()


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
def test_a_loss_on_codes_moves_the_query_and_key_weights(backend):
    layer = HyperAttention(8, 4, backend=backend)
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(2, 5, 8)
    losses = []
    for _ in range(20):
        with capture_codes(layer, detach=False) as codes:
            layer(x)
        loss = (codes[0][:, 0] - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = dict(layer.named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"query_proj.weight", "key_proj.weight"} <= moved and "value_proj.weight" not in moved


def test_shared_layers_are_numbered_by_use():
    transformer = model(share_layers=True)
    with capture_codes(transformer) as codes:
        transformer(X)
        first = dict(codes)
        transformer(X)
    assert sorted(codes) == [0, 1, 2]
    assert not torch.allclose(codes[0], codes[1])
    for layer in range(3):
        assert torch.equal(first[layer], codes[layer])


def test_shared_layers_keep_their_numbers_after_a_failure_and_inside_wrappers():
    transformer = model(share_layers=True)
    with capture_codes(transformer) as expected:
        transformer(X)
    wrapped = torch.nn.Sequential(transformer)
    with capture_codes(wrapped) as codes:
        hook = transformer.blocks[0].feedforward.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            wrapped(X)
        hook.remove()
        wrapped(X)
    assert sorted(codes) == [0, 1, 2]
    for layer in range(3):
        torch.testing.assert_close(codes[layer], expected[layer])


def test_drop_in_layers_of_any_module():
    network = torch.nn.Sequential(HyperAttention(8, 4), torch.nn.ReLU(), HyperAttention(8, 2))
    with capture_codes(network) as codes:
        network(torch.randn(2, 5, 8))
    assert codes[0].shape == (2, 4, 5, 5) and codes[1].shape == (2, 2, 5, 5)
    assert all(not module.observers for module in network if isinstance(module, HyperAttention))


def test_cross_attention_counts_queries_on_their_own():
    layer = HyperAttention(8, 4, context_dim=6)
    x, context = torch.randn(2, 3, 8), torch.randn(2, 5, 6)
    with capture_codes(layer) as every:
        layer(x, context)
    with capture_codes(layer, queries=[0, -1], keys=[4]) as codes:
        layer(x, context)
    assert codes[0].shape == (2, 4, 2, 1)
    torch.testing.assert_close(codes[0], every[0][:, :, [0, 2]][..., [4]])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": 3}, "layers must be numbers from 0 to 2, got 3"),
        ({"queries": 7}, "queries must be positions from 0 to 6, got 7"),
        ({"keys": [1, -9]}, "keys must be positions from 0 to 6"),
        ({"queries": slice(5, 2)}, "queries must be positions from 0 to 6"),
    ],
)
def test_wrong_choices(options, words):
    transformer = model()
    with pytest.raises(ValueError, match=words), capture_codes(transformer, **options):
        transformer(X)
    assert all(not block.attention.observers for block in transformer.layers())


def test_nothing_to_capture():
    with pytest.raises(ValueError, match="Linear has no HyperAttention layer"), capture_codes(torch.nn.Linear(2, 2)):
        pass
