"""`cross_layers`: the positions that are read are a second sequence, which reads the first by cross-attention."""

import pytest
import torch

from headcode import ModelConfig, Transformer, capture_codes
from headcode.analysis import capture, decode, open_run
from headcode.interop import to_reference
from headcode.nn import forward_flops, load_model
from headcode.presets import override, preset
from headcode.train import Trainer, read_metrics

SIZES = {"dim": 12, "num_heads": 3, "qk_dim": 6, "v_dim": 9, "mlp_dim": 10, "num_layers": 3}
METHODS = ("softmax", "linear", "hyla")
LAST = slice(-2, None)


def make(cross_layers=2, **options):
    torch.manual_seed(0)
    sizes = {"input_dim": 5, "output_dim": 3, "max_length": 7, **SIZES}
    return Transformer(ModelConfig(cross_layers=cross_layers, **{**sizes, **options})).double()


X = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def changed(position):
    x = X.clone()
    x[:, position] += 1.0
    return x


@pytest.mark.parametrize("method", METHODS)
def test_answers_see_the_context_and_not_one_another(method):
    model = make(method=method)
    before = model(X, queries=LAST)
    other_answer = model(changed(6), queries=LAST)
    assert torch.equal(other_answer[:, 0], before[:, 0])
    assert not torch.allclose(other_answer[:, 1], before[:, 1])
    for position in range(5):
        assert (model(changed(position), queries=LAST) - before).abs().amin(-1).min() > 0


@pytest.mark.parametrize("method", METHODS)
def test_the_context_does_not_see_the_answers(method):
    model = make(cross_layers=1, method=method)
    seen = []
    handle = model.blocks[1].register_forward_hook(lambda module, arguments, output: seen.append(output))
    model(X, queries=LAST)
    model(changed(5), queries=LAST)
    handle.remove()
    assert seen[0].shape == (2, 5, 12)
    assert torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("position", ["relative", "rotary", "learned", "relative_learned", "none"])
@pytest.mark.parametrize("method", METHODS)
def test_equals_self_attention_with_the_answers_masked_as_keys(method, position):
    """In one sequence with a mask that hides the answers from everyone, the answers get the same: exact positions."""
    sizes = {"qk_dim": 12} if position == "rotary" else {}
    model = make(method=method, position=position, **sizes)
    hidden = model.embedding(X)
    if model.positions is not None:
        hidden = hidden + model.positions
    keep = torch.ones(1, 1, 7, 7, dtype=torch.bool)
    keep[..., 5:] = False
    context = hidden
    for index, block in enumerate(model.blocks):
        # Cross-attention reads the context as the last self-attending layer left it.
        tokens = torch.cat([context[:, :5], hidden[:, 5:]], 1)
        attended = tokens + block.attention(block.attention_norm(tokens), mask=keep)
        after = attended + block.feedforward(block.feedforward_norm(attended))
        if index == 0:
            context = after
        else:
            hidden = after
    expected = model.output_proj(model.final_norm(hidden[:, 5:]))
    torch.testing.assert_close(model(X, queries=LAST), expected, rtol=0, atol=1e-12)


def test_same_parameters_as_one_sequence():
    one, two = make(0), make(2)
    assert {name: p.shape for name, p in one.named_parameters()} == {n: p.shape for n, p in two.named_parameters()}
    two(X, queries=LAST).sum().backward()
    assert all(parameter.grad is not None for parameter in two.parameters())


def test_shared_layers_read_and_cross():
    model = make(cross_layers=1, share_layers=True)
    with capture_codes(model) as codes:
        model(X, queries=LAST)
    assert {layer: tuple(c.shape) for layer, c in codes.items()} == {
        0: (2, 3, 5, 5),
        1: (2, 3, 5, 5),
        2: (2, 3, 2, 5),
    }


def test_codes_by_position_in_the_whole_sequence():
    model = make()
    with capture_codes(model) as codes:
        model(X, queries=LAST)
    with capture_codes(model, layers=[1, 2], queries=[-1, 5], keys=[0, 3]) as chosen:
        model(X, queries=LAST)
    torch.testing.assert_close(chosen[2], codes[2][:, :, [1, 0]][:, :, :, [0, 3]])
    with (
        capture_codes(model, layers=2, keys=[5]),
        pytest.raises(ValueError, match="keys must be positions from 0 to 4"),
    ):
        model(X, queries=LAST)


def test_ignored_context_has_no_say():
    model = make()
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[:, 1] = True
    before = model(X, queries=LAST, key_padding_mask=padding)
    assert torch.equal(model(changed(1), queries=LAST, key_padding_mask=padding), before)


def test_dropout_follows_its_seed():
    model = make(attention_dropout=0.5).train()
    first = model(X, queries=LAST, dropout_seed=3)
    assert torch.equal(model(X, queries=LAST, dropout_seed=3), first)
    assert not torch.allclose(model(X, queries=LAST, dropout_seed=4), first)
    model.eval()
    assert torch.equal(model(X, queries=LAST, dropout_seed=3), model(X, queries=LAST))


def test_arithmetic_by_hand():
    config = make().config.replace(method="linear")
    embedding, output = 7 * 5 * 12, 2 * 12 * 3
    feedforward = 2 * 12 * 10
    reading = 5 * 12 * (6 + 9)  # keys and values of the context
    encoder = reading + 5 * 12 * 6 + 25 * (6 + 9) + 5 * (9 * 12 + feedforward)
    crossing = reading + 2 * 12 * 6 + 10 * (6 + 9) + 2 * (9 * 12 + feedforward)
    assert forward_flops(config, 7, LAST) == 2 * (embedding + encoder + 2 * crossing + output)
    assert forward_flops(config, 7, LAST) < forward_flops(config.replace(cross_layers=0), 7, LAST)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cross_layers": 4}, r"cross_layers must lie in 0\.\.3, the number of layers, got 4"),
        ({"cross_layers": -1}, r"cross_layers must lie in 0\.\.3"),
        ({"causal": True}, "use causal=False"),
    ],
)
def test_what_cannot_be(options, words):
    with pytest.raises(ValueError, match=words):
        make(**options)


def test_queries_must_be_given_and_last():
    model = make()
    for queries, words in (
        (None, "needs queries"),
        (slice(2, 4), "last positions"),
        (slice(0, None), "last positions"),
    ):
        with pytest.raises(ValueError, match=words):
            model(X, queries=queries)
    with pytest.raises(ValueError, match="causal model"):
        model.new_cache()
    with pytest.raises(ValueError, match="use cross_layers=0"):
        to_reference(model)


@pytest.mark.parametrize("task", ["logic", "sraven"])
def test_trains_saves_and_is_read(task, tmp_path):
    sizes = {"logic": {"num_points": 7, "num_variables": 3}, "sraven": {"num_features": 2}}[task]
    sizes |= {**SIZES, "v_dim": 6, "num_layers": 2, "cross_layers": 1, "attention_dropout": 0.1}
    short = {"steps": 3, "batch_size": 8, "eval_size": 64, "eval_every": 0, "checkpoint_every": 0}
    config = override(preset(f"{task}-small"), **sizes, **short)
    trained = Trainer(config, tmp_path / "run").run().model
    x = config.task.sample("iid", 0, 4).x
    loaded = load_model(tmp_path / "run" / "checkpoints" / "step-3")
    assert loaded.config.cross_layers == 1
    assert torch.equal(loaded(x, queries=config.task.queries), trained(x, queries=config.task.queries))
    scores = [record for record in read_metrics(tmp_path / "run") if record["kind"] == "eval"]
    assert {record["split"] for record in scores} >= {"iid", "compositional"}

    run = open_run(tmp_path / "run")
    codes = capture(run, "iid", tmp_path / "codes.npz", size=8, keys="all")
    context = config.task.sequence_length - len(range(config.task.sequence_length)[config.task.queries])
    assert "codes_layer_0" not in codes  # the answers are not there yet
    assert codes["codes_layer_1"].shape == (8, (config.task.sequence_length - context) * context, 3)
    with pytest.raises(ValueError, match="do not see themselves"):
        capture(run, "iid", tmp_path / "more.npz", size=8)
    with pytest.raises(ValueError, match="layers 1 and later"):
        capture(run, "iid", tmp_path / "more.npz", size=8, layers=[0], keys="all")
    result = decode(tmp_path / "run", keys="all", fit_size=64, test_size=32, controls=("shuffled",))
    assert {row["layer"] for row in result["rows"]} == {1}
