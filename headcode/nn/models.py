"""The kinds of models, by the word that a task (`Task.model_kind`) and a model's file name them with."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from headcode.nn.config import ModelConfig
from headcode.nn.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from headcode.nn.transformer import Transformer


class Kind(NamedTuple):
    """A configuration and what is made from it."""

    config: type[ModelConfig]
    model: Any
    """A module made from such a configuration, called with (x, queries=…, dropout_seed=…), that has `config`, `blocks`,
    `attention_layers`, `layer_blocks` and `reset_parameters` as a Transformer has them."""


MODELS: dict[str, Kind] = {
    "transformer": Kind(ModelConfig, Transformer),
    "encoder_decoder": Kind(EncoderDecoderConfig, EncoderDecoder),
}


def make_model(config: ModelConfig) -> Any:
    """The model of a configuration.

    >>> type(make_model(ModelConfig(vocab_size=5, max_length=3))).__name__
    'Transformer'
    """
    return MODELS[config.kind].model(config)


def model_config(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration of any kind from its `to_dict`."""
    kind = values.get("kind", "transformer")
    if not isinstance(kind, str) or kind not in MODELS:
        raise ValueError(f"A model's kind must be one of {', '.join(MODELS)}, got {kind!r:.100}.")
    return MODELS[kind].config.from_dict({name: value for name, value in values.items() if name != "kind"})
