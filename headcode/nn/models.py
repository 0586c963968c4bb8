"""The kinds of models, by the word that a task (`Task.model_kind`) and a model's file name them with."""

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from headcode.nn.config import ModelConfig


class Kind(NamedTuple):
    """Where a kind's configuration and model are found; they are imported when one is needed, with what they need."""

    config_path: str
    """module:class of a ModelConfig with the fields of this kind."""
    model_path: str
    """module:class of a module made from such a configuration, called with (x, queries=…, dropout_seed=…), that has
    `config`, `blocks`, `attention_layers`, `layer_blocks` and `reset_parameters` as a Transformer has them."""

    @property
    def config(self) -> type[ModelConfig]:
        return _find(self.config_path)

    @property
    def model(self) -> Any:
        return _find(self.model_path)


MODELS: dict[str, Kind] = {
    "transformer": Kind("headcode.nn.config:ModelConfig", "headcode.nn.transformer:Transformer"),
    "encoder_decoder": Kind(
        "headcode.nn.encoder_decoder:EncoderDecoderConfig", "headcode.nn.encoder_decoder:EncoderDecoder"
    ),
    "graph_network": Kind("headcode.graph.config:GraphConfig", "headcode.graph.network:GraphNetwork"),
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


def _find(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
