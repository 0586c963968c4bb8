"""`HeadcodeConfig`: a `ModelConfig` as a Hugging Face configuration."""

import dataclasses
from typing import Any

from headcode.nn import ModelConfig

try:
    from transformers import PretrainedConfig
except ModuleNotFoundError:
    raise ModuleNotFoundError("Hugging Face models need transformers: pip install 'headcode[hf]'.") from None

# The library keeps max_length for generation, so ours goes by the library's name for it.
LENGTH = "max_position_embeddings"
_SKIPPED = ("input_dim", "max_length")
FIELDS = {field.name: field.default for field in dataclasses.fields(ModelConfig) if field.name not in _SKIPPED}
_TIED = "tie_word_embeddings"
_ELSEWHERE = (
    *("num_key_value_heads", "head_dim", "sliding_window", "rope_parameters", "rope_scaling", "rope_theta"),
    *("hidden_act", "attention_bias", "mlp_bias"),
)
"""Settings of other decoders' architecture that ours has no counterpart of."""


class HeadcodeConfig(PretrainedConfig):
    """The fields of a `ModelConfig` of tokens, as a Hugging Face configuration.

    `tie_word_embeddings=False` gives the logits a table of their own; with `output_dim` they come from a projection of
    that width, which is tied to nothing.
    """

    model_type = "headcode"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - the library's own convention
    attribute_map = {  # noqa: RUF012 - files have the library's names, and both can be used
        "dim": "hidden_size",
        "mlp_dim": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
    }
    base_model_fsdp_plan = {  # noqa: RUF012
        "transformer.embedding": "free_full_weight",
        "transformer.blocks.*": "free_full_weight",
        "transformer.final_norm": "keep_full_weight",
    }

    def __init__(self, **values: Any) -> None:
        names = {name: self.attribute_map.get(name, name) for name in (*FIELDS, LENGTH)}
        own = {name: values.pop(given) for name, both in names.items() for given in {name, both} if given in values}
        defaults = {**FIELDS, "vocab_size": 2048, LENGTH: 128, "causal": True}
        for name, default in defaults.items():
            setattr(self, name, own.get(name, default))
        if others := [name for name in _ELSEWHERE if values.pop(name, None) is not None]:
            raise ValueError(f"headcode models have no {', '.join(others)}: leave them out.")
        self.use_cache = values.pop("use_cache", True)
        values[_TIED] = values.get(_TIED, True) and self.output_dim is None
        super().__init__(**values)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Files of headcode 0.1 say that nothing is tied, and mean that there is one table."""
        if "logit_scale" not in config_dict:
            config_dict = {name: value for name, value in config_dict.items() if name != _TIED}
        return super().from_dict(config_dict, **options)

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's queries and keys, which is not that of its values."""
        return self.qk_dim // self.num_heads

    def to_model_config(self) -> ModelConfig:
        """Checked: a wrong value is one clear sentence."""
        config = ModelConfig(max_length=getattr(self, LENGTH), **{name: getattr(self, name) for name in FIELDS})
        if not config.causal or config.vocab_size is None:
            raise ValueError("HeadcodeForCausalLM needs a causal model of tokens: causal=True and a vocab_size.")
        return config
