"""HyperConv against the dense layer, against PyTorch Geometric's own layer, and on graphs of every kind."""

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric", reason="graph layers need headcode[graph]")

from torch_geometric.nn import TransformerConv
from torch_geometric.nn.aggr import SumAggregation

from headcode import METHODS, HyperAttention, capture_codes
from headcode.graph import HyperConv
from headcode.nn import edit_codes, value_network

WIDTHS = {"qk_dim": 6, "v_dim": 15}
NODES, DIM, HEADS = 5, 7, 3


def complete(nodes, sources=None):
    sources = nodes if sources is None else sources
    return torch.stack([torch.arange(sources).repeat(nodes), torch.arange(nodes).repeat_interleave(sources)])


def twins(pooling="sum", **settings):
    """The dense layer and the layer on graphs with the same weights, biases and all."""
    torch.manual_seed(0)
    settings = {"method": "hyla", **WIDTHS, **settings}
    dense = HyperAttention(DIM, HEADS, pooling=pooling, backend="reference", **settings).double()
    conv = HyperConv(DIM, HEADS, pooling=pooling, **settings).double()
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    conv.load_state_dict(dense.state_dict())
    return dense, conv


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
@pytest.mark.parametrize("method", METHODS)
def test_on_a_complete_graph_it_is_the_dense_layer(method, pooling):
    dense, conv = twins(pooling, method=method)
    x = torch.randn(1, NODES, DIM, dtype=torch.float64, requires_grad=True)
    expected, found = dense(x)[0], conv(x[0], complete(NODES))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    wanted = torch.autograd.grad(expected.sin().sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), x)[0], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["softmax", "linear", "hyla"])
def test_the_pooling_that_is_not_given_is_that_of_the_dense_layer(method):
    dense, conv = twins(None, method=method)
    x = torch.randn(1, NODES, DIM, dtype=torch.float64)
    torch.testing.assert_close(conv(x[0], complete(NODES)), dense(x)[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("value_net", ["swiglu", "gelu", "tanh", "relu_relu"])
@pytest.mark.parametrize("norm", ["softmax_head", "layer_head"])
def test_every_norm_and_value_net_is_that_of_the_dense_layer(norm, value_net):
    dense, conv = twins(norm=norm, value_net=value_net)
    x = torch.randn(1, NODES, DIM, dtype=torch.float64)
    torch.testing.assert_close(conv(x[0], complete(NODES)), dense(x)[0], rtol=0, atol=1e-9)


def test_two_kinds_of_nodes_are_cross_attention():
    dense, conv = twins(context_dim=11)
    x, context = torch.randn(1, 3, DIM).double(), torch.randn(1, NODES, 11).double()
    found = conv((context[0], x[0]), complete(3, NODES))
    torch.testing.assert_close(found, dense(x, context)[0], rtol=0, atol=1e-9)


def test_missing_edges_are_a_mask_and_their_order_does_not_matter():
    dense, conv = twins()
    mask = torch.rand(NODES, NODES, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[2] = False  # node 2 has no incoming edge
    x = torch.randn(1, NODES, DIM, dtype=torch.float64)
    target, source = mask.nonzero().T
    edges = torch.stack([source, target])[:, torch.randperm(int(mask.sum()))]
    torch.testing.assert_close(conv(x[0], edges), dense(x, mask=mask)[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(conv(x[0], edges)[2], conv.output_proj.bias)


def test_dropout_drops_the_pairs_that_the_dense_layer_drops():
    dense, conv = twins(dropout=0.4)
    x = torch.randn(1, NODES, DIM, dtype=torch.float64)
    found = conv(x[0], complete(NODES), dropout_seed=13)
    torch.testing.assert_close(found, dense(x, dropout_seed=13)[0], rtol=0, atol=1e-9)
    assert not torch.equal(found, conv(x[0], complete(NODES), dropout_seed=14))
    assert torch.equal(conv.eval()(x[0], complete(NODES)), conv(x[0], complete(NODES), dropout_seed=13))


@pytest.mark.parametrize("edge_dim", [None, 4])
def test_softmax_with_linear_value_nets_is_the_transformer_conv(edge_dim):
    torch.manual_seed(0)
    width = WIDTHS["v_dim"]  # that layer has one width for keys and values
    conv = HyperConv(DIM, HEADS, method="softmax", qk_dim=width, v_dim=width, edge_dim=edge_dim).double()
    peer = TransformerConv(DIM, width // HEADS, HEADS, edge_dim=edge_dim, root_weight=False).double()
    names = {"lin_query": "query_proj", "lin_key": "key_proj", "lin_value": "value_proj"}
    for theirs, ours in names.items():
        peer.get_submodule(theirs).load_state_dict(conv.get_submodule(ours).state_dict())
    edge_attr = None
    if edge_dim is not None:
        conv.edge_value_proj.load_state_dict(conv.edge_key_proj.state_dict())
        peer.lin_edge.load_state_dict(conv.edge_key_proj.state_dict())
        edge_attr = torch.randn(17, edge_dim, dtype=torch.float64)
    conv.output_proj = nn.Identity()
    x, edges = torch.randn(NODES, DIM, dtype=torch.float64), torch.randint(NODES, (2, 17))
    torch.testing.assert_close(conv(x, edges, edge_attr), peer(x, edges, edge_attr), rtol=0, atol=1e-9)


@pytest.mark.parametrize("value_net", ["linear", "tanh", "swiglu", "relu_value"])
@pytest.mark.parametrize("norm", ["softmax", "rms_head"])
def test_gradients_are_the_derivatives(norm, value_net):
    torch.manual_seed(0)
    conv = HyperConv(3, 2, norm=norm, value_net=value_net, qk_dim=4, v_dim=4, edge_dim=2, pooling=["sum", "mean"])
    conv = conv.double()
    edges = torch.tensor([[0, 1, 1, 2, 0], [1, 1, 2, 0, 1]])
    x, edge_attr = torch.randn(3, 3).double().requires_grad_(), torch.randn(5, 2).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, e: conv(x, edges, e), (x, edge_attr))


@pytest.mark.parametrize("edge_values", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_generated_networks_give_the_output_of_the_layer(method, edge_values):
    torch.manual_seed(0)
    settings = {**WIDTHS, "edge_dim": 2, "edge_values": edge_values, "pooling": "sum"}
    conv = HyperConv(DIM, HEADS, method=method, **settings).double()
    x, edges = torch.randn(NODES, DIM).double(), torch.randint(NODES, (2, 13))
    edge_attr = torch.randn(13, 2).double()
    with capture_codes(conv) as codes:
        expected = conv(x, edges, edge_attr)
    assert codes[0].shape == (13, HEADS)
    read = torch.cat((x[edges[0]], edge_attr), 1) if edge_values else x[edges[0]]
    messages = value_network(conv, codes[0])(read)
    pooled = torch.zeros(NODES, DIM).double().index_add(0, edges[1], messages)
    torch.testing.assert_close(pooled + conv.output_proj.bias, expected, rtol=0, atol=1e-9)


def test_codes_are_the_dense_ones_edge_by_edge():
    dense, conv = twins()
    x = torch.randn(1, NODES, DIM).double()
    with capture_codes(dense) as expected, capture_codes(conv) as codes:
        dense(x)
        conv(x[0], complete(NODES))
    source, target = complete(NODES)
    torch.testing.assert_close(codes[0], expected[0][0, :, target, source].T, rtol=0, atol=1e-12)


def test_codes_of_equal_graphs_are_laid_out_as_those_of_sequences():
    dense, conv = twins()
    x = torch.randn(2, NODES, DIM).double()
    edges = torch.cat([complete(NODES), complete(NODES) + NODES], 1)
    with capture_codes(dense, queries=[1, -1], keys=[0, 3]) as expected:
        dense(x)
    with capture_codes(conv, queries=[1, -1], keys=[0, 3]) as codes:
        conv(x.flatten(0, 1), edges, graphs=2)
    torch.testing.assert_close(codes[0], expected[0], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="leave out queries and keys"), capture_codes(conv, queries=[1]):
        conv(x[0], complete(NODES))


@pytest.mark.parametrize("graphs", [None, 1])
def test_edited_codes_take_effect(graphs):
    dense, conv = twins()
    x, edges = torch.randn(NODES, DIM).double(), complete(NODES)
    with edit_codes(conv, lambda layer, codes: codes):
        torch.testing.assert_close(conv(x, edges, graphs=graphs), conv(x, edges))
    with edit_codes(conv, lambda layer, codes: 3 * codes), edit_codes(dense, lambda layer, codes: 3 * codes):
        torch.testing.assert_close(conv(x, edges, graphs=graphs), dense(x[None])[0], rtol=0, atol=1e-9)


def test_a_loss_on_codes_trains_the_layer():
    _, conv = twins()
    with capture_codes(conv, detach=False) as codes:
        conv(torch.randn(NODES, DIM).double(), complete(NODES))
    codes[0].square().sum().backward()
    assert conv.query_proj.weight.grad.norm() > 0 and conv.value_proj.weight.grad is None


def test_self_loops_count_and_edges_that_are_there_twice_count_twice():
    _, conv = twins()
    x = torch.randn(NODES, DIM).double()
    bias = conv.output_proj.bias

    def gains(*pairs):
        return conv(x, torch.tensor(pairs).T) - bias

    torch.testing.assert_close(gains((1, 2), (1, 2)), 2 * gains((1, 2)))
    torch.testing.assert_close(gains((1, 2), (2, 2)), gains((1, 2)) + gains((2, 2)))
    assert gains((2, 2))[2].norm() > 0


@pytest.mark.parametrize("method", ["softmax", "hyla", "hyla_deeper"])
@pytest.mark.parametrize("pooling", ["sum", "mean", "max", "min", "std", ["sum", "max"]])
def test_graphs_without_edges_or_nodes_give_the_output_bias(method, pooling):
    conv = HyperConv(DIM, HEADS, method=method, **WIDTHS, pooling=pooling)
    none = torch.empty(2, 0, dtype=torch.int64)
    for nodes in (NODES, 0):
        x = torch.randn(nodes, DIM, requires_grad=True)
        out = conv(x, none)
        torch.testing.assert_close(out, conv.output_proj.bias.expand(nodes, DIM))
        out.sum().backward()


def test_several_poolings_stand_side_by_side():
    torch.manual_seed(0)
    both = HyperConv(DIM, HEADS, **WIDTHS, pooling=["sum", "max"])
    x, edges = torch.randn(NODES, DIM), torch.randint(NODES, (2, 13))
    expected = both.output_proj.bias.detach().clone()
    for pooling, weight in zip(["sum", "max"], both.output_proj.weight.split(WIDTHS["v_dim"], 1), strict=True):
        one = HyperConv(DIM, HEADS, **WIDTHS, pooling=pooling)
        one.load_state_dict({**both.state_dict(), "output_proj.weight": weight})
        expected = expected + one(x, edges) - one.output_proj.bias
    torch.testing.assert_close(both(x, edges), expected)
    with capture_codes(both) as codes:
        both(x, edges)
    with pytest.raises(ValueError, match="pools in several ways"):
        value_network(both, codes[0])
    module = HyperConv(DIM, HEADS, **WIDTHS, pooling=SumAggregation())
    assert module.output_proj.in_features == WIDTHS["v_dim"]


NONE = torch.empty(2, 0, dtype=torch.int64)
X = torch.zeros(NODES, DIM)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.zeros(NODES, 8), NONE), r"sources must have shape \(nodes, 7\), got \(5, 8\)"),
        ((torch.zeros(1, NODES, DIM), NONE), r"shape \(nodes, 7\), got \(1, 5, 7\)"),
        (((X, "x"), NONE), r"targets must have shape \(nodes, 7\), got str"),
        ((X, NONE.float()), "dense tensor of int64, got torch.float32"),
        ((X, torch.eye(NODES).to_sparse()), "dense tensor of int64"),
        ((X, [[0], [1]]), "dense tensor of int64, got list"),
        ((X, NONE.T), r"shape \(2, edges\), sources and targets, got \(0, 2\)"),
        ((X, torch.tensor([[0], [5]])), "names targets 5 to 5, and there are 5, from 0 on"),
        ((X, torch.tensor([[-1], [0]])), "names sources -1 to -1"),
        ((X, NONE, torch.zeros(0, 4)), r"made without edge_dim, got edge_attr \(0, 4\)"),
    ],
)
def test_wrong_inputs_are_one_sentence(arguments, words):
    with pytest.raises((ValueError, TypeError), match=words):
        HyperConv(DIM, HEADS, **WIDTHS)(*arguments)


def test_missing_features_of_edges_and_wrong_settings_are_one_sentence():
    conv = HyperConv(DIM, HEADS, **WIDTHS, edge_dim=4)
    with pytest.raises(ValueError, match=r"needs edge_attr of shape \(1, 4\), got no edge_attr"):
        conv(X, torch.tensor([[0], [1]]))
    with pytest.raises(ValueError, match=r"got edge_attr \(2, 4\)"):
        conv(X, torch.tensor([[0], [1]]), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="5 sources and 5 targets are not those of 2 equal graphs"):
        conv(X, torch.tensor([[0], [1]]), torch.zeros(1, 4), graphs=2)
    with pytest.raises(ValueError, match="pooling must be an aggregation .* got 'dodo'"):
        HyperConv(DIM, HEADS, **WIDTHS, pooling="dodo")
    with pytest.raises(ValueError, match="qk_dim must be divisible by num_heads"):
        HyperConv(DIM, HEADS)
    with pytest.raises(TypeError, match="edge_dim must be an integer"):
        HyperConv(DIM, HEADS, **WIDTHS, edge_dim=0.5)


def test_memory_grows_with_edges_and_not_with_pairs_of_nodes():
    """30,000 nodes have 900 million pairs; their codes alone would take 14 GB."""
    conv = HyperConv(8, 4, edge_dim=3, pooling=["sum", "max"])
    edges = torch.randint(30_000, (2, 20_000), generator=torch.Generator().manual_seed(0))
    held = 0

    def note(tensor):
        nonlocal held
        held += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        conv(torch.randn(30_000, 8), edges, torch.randn(20_000, 3)).sum().backward()
    assert held < 300 * 50_000
