"""MultiheadHyperAttention in the place of nn.MultiheadAttention: the same numbers, masks, shapes and state."""

import itertools

import pytest
import torch
from torch import nn

from headcode.nn import MultiheadHyperAttention, capture_codes

E, H = 12, 3


def pair(batch_first=False, **options):
    """torch's layer with weights that are not 0, and ours with the same ones."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, batch_first=batch_first, **options).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    ours = MultiheadHyperAttention(E, H, batch_first=batch_first, method="softmax", **options).double().eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def tokens(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(theirs, ours, *arguments, **options):
    wanted, wanted_weights = theirs(*arguments, **options)
    given, weights = ours(*arguments, **options)
    torch.testing.assert_close(given, wanted, rtol=1e-6, atol=1e-6)
    assert (weights is None) == (wanted_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, wanted_weights, rtol=1e-6, atol=1e-6)


@pytest.fixture
def masks():
    generator = torch.Generator().manual_seed(3)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    mask = torch.rand(5, 7, generator=generator) > 0.7
    mask[:, 0] = False  # torch gives NaN where a query sees nothing
    per_head = (torch.rand(2 * H, 5, 7, generator=generator) > 0.6).index_fill(2, torch.tensor(0), False)
    added = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    return {
        "attn_mask": [None, mask, added, added.masked_fill(mask, -torch.inf), per_head, per_head * -0.7],
        "key_padding_mask": [None, padding, torch.zeros(2, 7).double().masked_fill(padding, -torch.inf)],
    }


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("weights", [{}, {"need_weights": False}, {"average_attn_weights": False}])
def test_masks_and_padding(batch_first, weights, masks):
    theirs, ours = pair(batch_first)
    shapes = ((2, 5, E), (2, 7, E), (2, 7, E)) if batch_first else ((5, 2, E), (7, 2, E), (7, 2, E))
    arguments = [tokens(*shape, seed=i) for i, shape in enumerate(shapes)]
    for attn_mask, padding in itertools.product(masks["attn_mask"], masks["key_padding_mask"]):
        if attn_mask is not None and padding is not None and attn_mask.dtype != padding.dtype:
            continue  # torch warns of it
        attn_mask = attn_mask.double() if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        check(theirs, ours, *arguments, key_padding_mask=padding, attn_mask=attn_mask, **weights)


@pytest.mark.parametrize("batch_first", [False, True])
def test_without_a_batch(batch_first, masks):
    theirs, ours = pair(batch_first)
    query, context = tokens(5, E), tokens(7, E, seed=2)
    for mask in masks["attn_mask"][:4]:
        check(theirs, ours, query, context, context, attn_mask=mask)
        check(theirs, ours, query, context, context, attn_mask=mask, average_attn_weights=False)
    check(theirs, ours, query, context, context, key_padding_mask=masks["key_padding_mask"][1][1])


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kind", ["boolean", "floating"])
def test_self_attention_with_the_causal_hint(kind, need_weights):
    theirs, ours = pair(batch_first=True)
    x = tokens(2, 7, E)
    mask = nn.Transformer.generate_square_subsequent_mask(7).double()
    mask = mask if kind == "floating" else mask != 0
    for is_causal in (False, True):
        check(theirs, ours, x, x, x, attn_mask=mask, is_causal=is_causal, need_weights=need_weights)


@pytest.mark.parametrize("options", [{"kdim": 10, "vdim": 8}, {"bias": False}, {"kdim": 10, "vdim": 10}, {}])
def test_other_widths_biases_and_every_state(options):
    theirs, ours = pair(**options)
    arguments = tokens(5, 2, E), tokens(7, 2, theirs.kdim, seed=2), tokens(7, 2, theirs.vdim, seed=3)
    check(theirs, ours, *arguments)
    again = MultiheadHyperAttention(E, H, method="softmax", **options).double().eval()
    again.load_state_dict(ours.state_dict())
    check(theirs, again, *arguments)


def test_gradients_are_torchs():
    theirs, ours = pair(batch_first=True)
    x = tokens(2, 5, E)
    for layer in (theirs, ours):
        layer(x, x, x)[0].sin().sum().backward()
    found = torch.cat([p.weight.grad for p in (ours.attention.query_proj, ours.attention.key_proj)])
    torch.testing.assert_close(found, theirs.in_proj_weight.grad[: 2 * E], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.out_proj.weight.grad, theirs.out_proj.weight.grad, rtol=1e-6, atol=1e-6)


def test_a_state_dict_of_a_whole_encoder_loads():
    theirs = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(E, H, 20, batch_first=True), 2, enable_nested_tensor=False
    )
    ours = replaced(theirs, method="softmax").double().eval()
    theirs = theirs.double().eval()
    ours.load_state_dict(theirs.state_dict())
    x, padding = tokens(2, 7, E), torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    for options in ({}, {"src_key_padding_mask": padding}, {"mask": torch.ones(7, 7).triu(1).bool()}):
        expected, given = theirs(x, **options), ours(x, **options)
        seen = ~padding if "src_key_padding_mask" in options else torch.ones_like(padding)
        torch.testing.assert_close(given[seen], expected[seen], rtol=1e-6, atol=1e-6)


def replaced(encoder, **options):
    """A copy of torch's encoder with ours in every layer."""
    import copy

    encoder = copy.deepcopy(encoder)
    for layer in encoder.layers:
        layer.self_attn = MultiheadHyperAttention(E, H, batch_first=True, **options)
    return encoder


@pytest.mark.parametrize("method", ["hyla", "softmax"])
def test_torchs_fast_path_is_not_taken(method):
    """In evaluation torch would pass the weights on to its own softmax kernel, and pad with nested tensors."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, 2, 20, batch_first=True), 2).eval()
    encoder = replaced(encoder, method=method).eval()
    x, padding = tokens(2, 7, E).float(), torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    with_grad = encoder(x, src_key_padding_mask=padding)
    with torch.no_grad(), capture_codes(encoder) as codes:
        without = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(without[~padding], with_grad[~padding], rtol=1e-5, atol=1e-5)
    assert codes[0].shape == (2, H, 7, 7) and list(codes) == [0, 1]


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_trains_with_it(norm_first):
    """First token or last: which of the two is larger at a marked place."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 24, dropout=0.0, batch_first=True, norm_first=norm_first)
    layer.self_attn = MultiheadHyperAttention(E, H, batch_first=True, method="hyla")
    model = nn.Sequential(nn.Linear(2, E), layer, nn.Linear(E, 1))
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    losses = []
    for _ in range(150):
        x = torch.randn(64, 6, 2)
        target = (x[:, :, :1] * x[:, :, 1:]).mean(1, keepdim=True).expand(-1, 6, -1)
        loss = (model(x) - target).square().mean() / target.var()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[:5]) / 5 > 0.8 and sum(losses[-5:]) / 5 < 0.3


def test_weights_are_the_codes_of_hyla():
    layer, x = MultiheadHyperAttention(E, H, batch_first=True), torch.randn(2, 5, E)
    with capture_codes(layer) as codes:
        _, single = layer(x, x, x, average_attn_weights=False)
        _, mean = layer(x, x, x)
    torch.testing.assert_close(single, codes[0])
    torch.testing.assert_close(mean, codes[0].mean(1))


@pytest.mark.parametrize("lowest", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_large_negative_numbers_hide_as_from_a_softmax(lowest):
    """Added to all of a pair's scores they would leave a code of size 1, and the future in sight."""
    layer, x = MultiheadHyperAttention(E, H, batch_first=True), torch.randn(2, 5, E)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = layer(x, x, x, attn_mask=hidden)
    torch.testing.assert_close(layer(x, x, x, attn_mask=torch.zeros(5, 5).masked_fill(hidden, lowest)), expected)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    given = layer(x, x, x, key_padding_mask=torch.zeros(2, 5).masked_fill(padding, lowest))
    torch.testing.assert_close(given, layer(x, x, x, key_padding_mask=padding))


def test_masks_of_heads_in_one_traced_graph():
    theirs, ours = pair(batch_first=True)
    x = tokens(2, 5, E)
    per_head = (torch.rand(2 * H, 5, 5, generator=torch.Generator().manual_seed(4)) > 0.6).index_fill(
        2, torch.tensor(0), False
    )
    traced = torch.compile(ours, backend="eager", fullgraph=True)
    for given, expected in zip(traced(x, x, x, attn_mask=per_head), theirs(x, x, x, attn_mask=per_head), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-6)
    hyla = torch.compile(MultiheadHyperAttention(E, H, batch_first=True).double(), backend="eager")
    with pytest.raises(Exception, match=r"under torch.compile and vmap give it as \(Tq, Tk\)"):
        hyla(x, x, x, attn_mask=per_head)


def test_floating_masks_of_every_example_under_vmap():
    layer, x = MultiheadHyperAttention(E, H, batch_first=True), torch.randn(4, 5, E)
    masks = torch.randn(4, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)

    def output(x, mask):
        return layer(x, x, x, attn_mask=mask, need_weights=False)[0]

    found = torch.func.vmap(output)(x, masks)
    for i in range(4):
        torch.testing.assert_close(found[i], output(x[i], masks[i]), rtol=1e-5, atol=1e-6)


def nested(*lengths):
    return torch.nested.nested_tensor([torch.randn(length, E) for length in lengths], layout=torch.jagged)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda a, x: MultiheadHyperAttention(E, H, add_bias_kv=True), ValueError, "add_bias_kv=True is not supported"),
        (lambda a, x: MultiheadHyperAttention(E, H, add_zero_attn=True), ValueError, "add_zero_attn=True is not"),
        (lambda a, x: MultiheadHyperAttention(E, 5), ValueError, "qk_dim must be divisible by num_heads"),
        (lambda a, x: a(x, x, x, is_causal=True), ValueError, "attn_mask is None: give the mask"),
        (lambda a, x: a(x, x[0], x[0]), ValueError, "must have 3 axes, or 2 without a batch"),
        (lambda a, x: a(x, x, x, attn_mask=torch.ones(4, 5).bool()), ValueError, r"must have shape \(5, 5\) or \(6, 5"),
        (lambda a, x: a(x, x, x, attn_mask=torch.ones(5, 5).long()), TypeError, "boolean .* or floating"),
        (lambda a, x: a(x, x, x, attn_mask=torch.ones(3, 3), is_causal=True), ValueError, "attn_mask must have shape"),
        (lambda a, x: a(x, None, None), TypeError, "key must be a torch.Tensor, got NoneType"),
        (lambda a, x: a(x, x, x, attn_mask=torch.ones(5, 5).numpy()), TypeError, "attn_mask must be a torch.Tensor"),
        (
            lambda a, x: a(*[x[0]] * 3, key_padding_mask=torch.zeros(1, 5)),
            ValueError,
            r"\(keys,\) = \(5,\), got \(1, 5",
        ),
        (lambda a, x: a(x, nested(3, 5), nested(3, 5)), ValueError, "all of query, key and value .* or none"),
        (lambda a, x: a(*3 * [nested(3, 5)]), ValueError, "go without need_weights: give None or False"),
        (lambda a, x: a(*3 * [nested(3)], None, False, is_causal=True), ValueError, "go without is_causal"),
        (
            lambda a, x: a(
                x, x, x, attn_mask=torch.eye(5).bool().expand(6, 5, 5) & (torch.arange(6) == 2)[:, None, None]
            ),
            ValueError,
            "must hide the same pairs from all heads",
        ),
    ],
)
def test_refuses_and_says_why(call, error, words):
    with pytest.raises(error, match=words):
        call(MultiheadHyperAttention(E, H, batch_first=True), torch.randn(2, 5, E))


def test_every_argument_of_torchs_layer_has_its_place_and_default():
    import inspect

    for method in ("__init__", "forward"):
        theirs = inspect.signature(getattr(nn.MultiheadAttention, method)).parameters
        ours = inspect.signature(getattr(MultiheadHyperAttention, method)).parameters
        assert [(n, p.default) for n, p in theirs.items()] == [
            (n, p.default) for n, p in ours.items() if n != "options"
        ]
