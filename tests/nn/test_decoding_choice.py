"""Between two tokens anything may happen to a model: decoding sees what the layers would."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from headcode import capture_codes
from headcode.nn import Transformer, decoding_weights, edit_codes, generate, why_decoded_op_by_op
from headcode.presets import preset
from tests.nn.test_decoding import decode, decoder, tokens
from tests.support.adapters import CHANGES, LowRankTable, adapted, merged
from tests.support.models import distance, exact


def decode_with_a_change(model, change, x):
    """Logits of the last three of the tokens x, before which the model was changed."""
    cache = model.new_cache(recurrent=False)
    decode(model, x[:, :-3], [x.shape[1] - 5, 1, 1], cache=cache)
    change(model)
    return decode(model, x[:, -3:], [1, 1, 1], cache=cache)


def by_layers(model, change, x, monkeypatch):
    """The same by the layers alone."""
    with monkeypatch.context() as context:
        context.setattr("headcode.nn.transformer.decode_compiled", lambda *arguments: None)
        return decode_with_a_change(model, change, x)


def halve_in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def halve_behind_the_version(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def halve_elsewhere(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def load_another_state(model):
    model.load_state_dict({name: 0.5 * tensor for name, tensor in model.state_dict().items()})


def replace_a_parameter(model):
    part = model.blocks[1].attention.value_proj
    part.weight = nn.Parameter(0.5 * part.weight.detach())


def replace_a_part(model):
    model.blocks[0].feedforward_norm = nn.LayerNorm(48, eps=1e-2, dtype=model.embedding.weight.dtype)


def replace_a_block(model):
    model.blocks[1] = copy.deepcopy(model.blocks[0])


def change_an_epsilon(model):
    model.final_norm.eps = 1000  # a whole number


def lose_a_bias(model):
    model.blocks[0].attention.key_proj.bias = None


@pytest.mark.parametrize("method", ["softmax", "linear", "hyla"])
@pytest.mark.parametrize(
    "change",
    [
        halve_in_place,
        halve_behind_the_version,
        halve_elsewhere,
        load_another_state,
        replace_a_parameter,
        replace_a_part,
        replace_a_block,
        lose_a_bias,
        change_an_epsilon,
    ],
)
def test_weights_that_change_are_read_anew(change, method, compiled, monkeypatch):
    model, x = decoder(method=method, position="relative"), tokens(2, 11)
    given = decode_with_a_change(copy.deepcopy(model), change, x)
    assert compiled == [True] * 6
    expected = by_layers(exact(model), change, x, monkeypatch)
    assert distance(given, expected) < 1e-5
    assert distance(given, decode(exact(model), x, [11])[:, -3:]) > 1e-3


def hook_a_norm(model):
    model.final_norm.register_forward_hook(lambda module, arguments, output: 0.5 * output)


def hook_the_embedding(model):
    model.embedding.register_forward_pre_hook(lambda module, arguments: (arguments[0] * 0,))


def patch_a_block(model):
    block = model.blocks[1]
    forward = block.forward
    block.forward = lambda *arguments, **options: 0.5 * forward(*arguments, **options)


def parametrise(model):
    parametrize.register_parametrization(model.blocks[0].attention.query_proj, "weight", nn.Tanh())


def adapt(model):
    for block in model.blocks:
        block.attention.value_proj = CHANGES[-1](block.attention.value_proj)


def adapt_the_embedding(model):
    model.embedding = LowRankTable(model.embedding)


@pytest.mark.parametrize(
    "change", [hook_a_norm, hook_the_embedding, patch_a_block, parametrise, adapt, adapt_the_embedding]
)
def test_what_is_watched_or_replaced_goes_through_the_layers(change, compiled, monkeypatch):
    model, x = decoder(method="hyla", position="rotary"), tokens(2, 11)
    torch.manual_seed(1)
    given = decode_with_a_change(copy.deepcopy(model), change, x)
    assert compiled == [True] * 3 + [False] * 3
    torch.manual_seed(1)
    expected = by_layers(copy.deepcopy(model), change, x, monkeypatch)
    assert distance(given, expected.double()) < 1e-5


def drop_a_layer(model):
    model.blocks = model.blocks[:1]


def tie_the_outputs(model):
    model.output_proj = None


def normalise_no_queries(model):
    for block in model.blocks:
        block.attention.query_norm = block.attention.key_norm = None


def normalise_queries(model):
    for block in model.blocks:
        block.attention.query_norm, block.attention.key_norm = nn.RMSNorm(8), nn.RMSNorm(8)


@pytest.mark.parametrize(
    ("change", "changes"),
    [
        (drop_a_layer, {}),
        (tie_the_outputs, {"output_dim": 80}),
        (normalise_no_queries, {"qk_norm": True}),
        (normalise_queries, {}),
    ],
)
def test_parts_that_the_config_does_not_know_go_through_the_layers(change, changes, compiled):
    model, x = decoder(method="hyla", position="rotary", **changes), tokens(2, 7)
    change(model)
    with torch.no_grad():
        expected = model(x)
    assert distance(decode(model, x, [5, 1, 1]), expected.double()) < 1e-5
    assert compiled == [False] * 3


def test_queries_that_are_no_range_are_for_the_layers_to_refuse():
    model, x = decoder(method="hyla"), tokens(1, 3)
    with torch.no_grad(), pytest.raises(ValueError, match="a slice of integers"):
        model(x, queries=slice(0.5, None), cache=model.new_cache())


@pytest.mark.parametrize("setting", ["backend", "training"])
def test_a_layer_that_is_set_otherwise(setting, compiled):
    model, x = decoder(method="hyla", attention_dropout=0.5), tokens(1, 9)
    cache = model.new_cache()
    decode(model, x[:, :5], [4, 1], cache=cache)
    setattr(model.blocks[1].attention, setting, "chunked" if setting == "backend" else True)
    decode(model, x[:, 5:6], [1], cache=cache)
    assert compiled == [True, True, False]
    model.blocks[1].attention.backend = "auto"
    model.eval()
    decode(model, x[:, 6:7], [1], cache=cache)
    assert compiled[-1]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_why_a_changed_projection_is_called(change, compiled):
    model = decoder(method="hyla")
    model.blocks[1].attention.value_proj = change(model.blocks[1].attention.value_proj)
    assert why_decoded_op_by_op(model).startswith("blocks.1.attention.value_proj")
    assert len(list(generate(model, [1, 2], 3))) == 3
    assert compiled == [False] * 3


def test_codes_are_captured_and_edited_as_ever(compiled):
    model, x = decoder(method="hyla", position="rotary"), tokens(2, 8)
    cache = model.new_cache()
    decode(model, x[:, :6], [5, 1], cache=cache)
    with capture_codes(model) as codes, torch.no_grad():
        captured = model(x[:, 6:7], cache=cache)
    assert codes[1].shape == (2, 4, 1, 7)
    with edit_codes(model, lambda layer, codes: 0.5 * codes), torch.no_grad():
        edited = model(x[:, 7:8], cache=cache)
    assert compiled == [True, True, False, False]
    whole = decode(exact(model), x, [8])
    assert distance(captured, whole[:, 6:7]) < 1e-5 and distance(edited, whole[:, 7:8]) > 1e-3


class Operations(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.seen += 1
        return function(*arguments, **(options or {}))


def test_who_watches_or_transforms_the_call(compiled):
    model, x = decoder(method="hyla", position="rotary"), tokens(2, 1)
    with Operations() as operations:
        decode(model, x, [1])
    assert operations.seen > 20
    with torch.autocast("cpu", torch.bfloat16):
        decode(model, x, [1])
    handle = nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    decode(model, x, [1])
    handle.remove()
    assert compiled == [False] * 3
    decode(model, x.int(), [1])
    decode(copy.deepcopy(model).double(), x, [1])
    assert compiled == [False] * 5
    with torch.inference_mode():
        decode(model, x, [1])
    assert compiled[-1]


def test_a_kind_of_model_of_its_own(compiled):
    class Louder(Transformer):
        def embed(self, x, first_position=0):
            return 2 * super().embed(x, first_position)

    model = Louder(decoder(method="hyla", position="rotary").config).eval()
    assert "Louder" in why_decoded_op_by_op(model)
    decode(model, tokens(2, 1), [1])
    assert compiled == [False]


def test_a_model_with_swapped_parameters(compiled):
    model, other, x = decoder(method="hyla"), decoder(method="hyla"), tokens(1, 7)
    halve_in_place(other)
    cache, expected = model.new_cache(), decode(exact(other), x, [7])
    with torch.no_grad():
        parameters = dict(other.named_parameters())
        given = [torch.func.functional_call(model, parameters, (x[:, i : i + 1],), {"cache": cache}) for i in range(7)]
    assert distance(torch.cat(given, 1), expected) < 1e-5


def test_adapters_and_merged_ones_give_the_same_tokens(compiled):
    model = adapted(decoder(method="hyla", position="rotary", output_dim=71))
    given = list(generate(model, [1, 2, 3], 9, temperature=0))
    assert compiled == [False] * 9
    assert given == list(generate(merged(model), [1, 2, 3], 9, temperature=0))
    assert compiled[9:] == [True] * 9


def test_one_cache_for_two_models(compiled):
    """It is the layers' own past that counts; what was prepared is for one model."""
    first, x = decoder(method="hyla", position="rotary"), tokens(2, 7)
    second = copy.deepcopy(first)
    halve_in_place(second)
    cache = first.new_cache()
    decode(first, x[:, :5], [4, 1], cache=cache)
    other = copy.deepcopy(cache)
    given = decode(second, x[:, 5:6], [1], cache=cache)
    assert torch.equal(given, decode(second, x[:, 5:6], [1], cache=other))
    assert not torch.equal(given, decode(first, x, [5, 1, 1])[:, 5:6])


def test_a_cache_of_other_numbers_is_for_the_layers(compiled):
    model, x = decoder(method="hyla", position="rotary"), tokens(2, 6)
    cache = model.new_cache()
    decode(model, x[:, :5], [4, 1], cache=cache)
    for layer in cache.layers:
        layer.keys = layer.keys.transpose(2, 3).contiguous().transpose(2, 3)
    given = decode(model, x[:, 5:], [1], cache=cache)
    assert compiled == [True, True, False]
    assert distance(given, decode(exact(model), x, [6])[:, 5:]) < 1e-5


@pytest.mark.parametrize("setting", [torch.float64, torch.bfloat16, "meta"], ids=str)
@pytest.mark.parametrize(
    "changes", [{"position": "rotary"}, {"position": "sinusoidal"}, {"method": "linear", "position": "none"}]
)
def test_torchs_default_dtype_and_device_are_not_the_models(setting, changes, compiled):
    model, x = decoder(**changes), tokens(2, 9)
    expected = decode(exact(model), x, [9])
    compiled.clear()
    decoding_weights._rotations.cache_clear()
    decoding_weights._sinusoids.cache_clear()
    set_default = torch.set_default_device if setting == "meta" else torch.set_default_dtype
    set_default(setting)
    try:
        given = [decode(model, x, [5, 1, 3], recurrent) for recurrent in {False, "method" in changes}]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(compiled)
    for logits in given:
        assert logits.dtype is torch.float32 and logits.device.type == "cpu" and distance(logits, expected) < 1e-5


def test_presets_language_models_are_served():
    for name, widths in (("lm-small", {}), ("wikitext-authors", {}), ("lm-paper", {"num_layers": 1})):
        config = preset(name).model.replace(**widths, vocab_size=64)
        for method in ("softmax", "linear", "hyla"):
            model = Transformer(config.replace(method=method, recurrent=False)).eval()
            assert why_decoded_op_by_op(model) is None
