"""Where the parts of attention are in Hugging Face's transformers, one row per architecture.

The lens needs, of every layer, the module that returns the attention weights, the values' projection and the output
projection. Nothing else in headcode knows an architecture's names. Weights are read from safetensors files alone.
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from headcode.files import is_there
from headcode.interop.streaming import stream_layers
from headcode.nn.plain import affine_map, full_name, own_weight, why_called

Affine = tuple[Tensor, Tensor | None]
"""Weight (out, in) and bias (out,) or None."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Paths from the base model to its layers, and from a layer to its parts."""

    layers: str
    attention: str
    """Called with the tokens x; returns a tuple with the attention weights (B, H, Tq, Tk) in it."""
    value: str
    output: str
    """Its output is the layer's attention output, before any residual or norm."""
    read_value: Callable[[nn.Module, Any], Affine] = lambda module, config: read_linear("value", module)
    weights_entry: int = 1
    """Which entry of that tuple they are."""
    called: str = ""
    """The part of the base model that is called; the model itself unless given."""
    sees_images: bool = False
    model_class: str = "AutoModel"
    """What opens a folder."""
    predicts: bool = False
    """Whether it is a language model: each token predicts the next."""


def read_linear(name: str, module: nn.Module) -> Affine:
    """Weight (out, in) and bias of a projection: a Linear, GPT-2's Conv1D, or either with adapters or hooks."""
    kind, width = type(module), getattr(module, "in_features", None)
    if kind.__name__ == "Conv1D":  # its weight is (in, out)
        weight = own_weight(module, kind)
        if weight is not None and why_called(module, kind) is None:
            return weight.detach().T, cast(Tensor, module.bias).detach()
        width = cast(Tensor, module.weight).shape[0]
    if not isinstance(width, int):
        raise ValueError(f"its {name} projection is a {full_name(module)}, which does not say its in_features")
    with torch.no_grad():
        weight, bias = affine_map(f"its {name} projection", module, width)
    return weight.detach(), None if bias is None else bias.detach()


def _last_third(module: nn.Module, config: Any) -> Affine:
    """Values of a projection to queries, keys and values one after the other."""
    weight, bias = read_linear("value", module)
    start = 2 * weight.shape[0] // 3
    return weight[start:], None if bias is None else bias[start:]


def _third_of_each_head(module: nn.Module, config: Any) -> Affine:
    """Values of a projection that has query, key and value of one head, then of the next."""
    weight, bias = read_linear("value", module)
    heads = config.num_attention_heads
    value = weight.unflatten(0, (heads, 3, -1))[:, 2].flatten(0, 1)
    return value, None if bias is None else bias.unflatten(0, (heads, 3, -1))[:, 2].flatten()


_ENCODER = Architecture("encoder.layer", "attention.self", "attention.self.value", "attention.output.dense")
_DECODER = Architecture("layers", "self_attn", "self_attn.v_proj", "self_attn.o_proj", predicts=True)
ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), _ENCODER),
    "distilbert": Architecture("transformer.layer", "attention", "attention.v_lin", "attention.out_lin"),
    "gpt2": Architecture("h", "attn", "attn.c_attn", "attn.c_proj", _last_third, predicts=True),
    "gpt_neox": Architecture(
        "layers", "attention", "attention.query_key_value", "attention.dense", _third_of_each_head, predicts=True
    ),
    "t5": Architecture(  # its encoder: the decoder and its cross-attention are not read
        "encoder.block",
        "layer.0.SelfAttention",
        "layer.0.SelfAttention.v",
        "layer.0.SelfAttention.o",
        weights_entry=2,
        called="encoder",
        model_class="T5EncoderModel",
    ),
    "vit": Architecture("layers", "attention", "attention.v_proj", "attention.o_proj", sees_images=True),
    **dict.fromkeys(
        (
            "llama",
            "mistral",
            "mixtral",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "gemma",
            "gemma2",
            "gemma3_text",
            "olmo",
            "olmo2",
            "starcoder2",
        ),
        _DECODER,
    ),
}


@dataclasses.dataclass(frozen=True)
class AttentionWeights:
    """The linear maps of one layer, by head, in float64: what generates its value networks."""

    value: Tensor
    """(H, Dv, dim); grouped heads share theirs. A gated value net has its gate and its signal in 2 Dv channels."""
    value_bias: Tensor | None
    """(H, Dv)"""
    output: Tensor
    """(H, dim, Dv)"""
    output_bias: Tensor | None
    """(dim,)"""
    value_net: str = "linear"


def architecture_of(config: Any) -> Architecture:
    name = getattr(config, "model_type", None)
    if name not in ARCHITECTURES:
        known = ", ".join(sorted((*ARCHITECTURES, "headcode")))
        raise ValueError(f"The lens cannot read the architecture {name!r}; it reads {known}.")
    return ARCHITECTURES[name]


def part(module: nn.Module, path: str) -> nn.Module | None:
    """A submodule by its dotted path, or None."""
    for name in path.split("."):
        module = getattr(module, name, None)  # type: ignore[assignment]
        if module is None:
            return None
    return module


def read_attention(layer: nn.Module, architecture: Architecture, config: Any) -> AttentionWeights:
    """The weights of a layer's value and output projections by head; ValueError with the reason if they cannot be."""
    parts = {name: part(layer, getattr(architecture, name)) for name in ("attention", "value", "output")}
    if missing := [name for name, module in parts.items() if module is None]:
        path = getattr(architecture, missing[0])
        raise ValueError(f"{type(layer).__name__} has no {path}, where softmax attention has its {missing[0]}")
    value, value_bias = architecture.read_value(cast(nn.Module, parts["value"]), config)
    output, output_bias = read_linear("output", cast(nn.Module, parts["output"]))
    heads = config.num_attention_heads
    if output.shape[1] % heads:
        raise ValueError(f"its output projection takes {output.shape[1]} channels, which {heads} heads do not divide")
    width = output.shape[1] // heads
    if value.shape[0] % width or heads % (value.shape[0] // width):
        raise ValueError(f"its values have {value.shape[0]} channels, not a whole number of heads of width {width}")
    group = heads // (value.shape[0] // width)
    value = value.double().unflatten(0, (-1, width)).repeat_interleave(group, 0)
    if value_bias is not None:
        value_bias = value_bias.double().unflatten(0, (-1, width)).repeat_interleave(group, 0)
    return AttentionWeights(
        value,
        value_bias,
        output.double().unflatten(1, (heads, width)).transpose(0, 1),
        None if output_bias is None else output_bias.double(),
    )


def load_pretrained(name: str | Path, *, tokenizer: bool = True) -> tuple[nn.Module, Any]:
    """The base model, in float32 with eager attention, and its tokenizer, from a local folder or by hub name.

    Only safetensors weights are read: a folder that has nothing but pickled ones is refused, and code that comes with
    a model is never run. A folder needs no network, and HF_HUB_OFFLINE=1 keeps to the local cache. The layers of a
    folder are read when a forward pass comes to them and dropped behind it (`stream_layers`), wherever the files name
    the tensors as the model does; a model by hub name, or with other names, is loaded whole.
    """
    transformers = _transformers()
    folder = Path(name).expanduser()
    local = folder.is_dir()
    if local:
        _check_folder(folder)
    elif not _looks_like_hub_name(str(name)):
        raise ValueError(f"{name} is neither a folder nor the name of a model on the hub.")
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    options: dict[str, Any] = {"local_files_only": local or offline, "trust_remote_code": False}
    source = str(folder) if local else str(name)
    missing: list[str] = []
    try:
        config = transformers.AutoConfig.from_pretrained(source, **options)
        architecture = architecture_of(config)
        model = _stream(folder, config, architecture) if local else None
        if model is None:
            how = {"attn_implementation": "eager", "use_safetensors": True, "dtype": torch.float32}
            model, found = getattr(transformers, architecture.model_class).from_pretrained(
                source, config=config, output_loading_info=True, **how, **options
            )
            # What the file lacks is filled with random numbers; only a pooler is no part of attention.
            missing = sorted(key for key in found["missing_keys"] if not key.startswith("pooler."))
        reads_text = tokenizer and not architecture.sees_images
        words = transformers.AutoTokenizer.from_pretrained(source, **options) if reads_text else None
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())[:400]) from None
    except Exception as error:  # transformers raises whatever its many readers do
        first = " ".join(str(error).split())[:300]
        raise ValueError(f"{name} could not be loaded: {first}") from None
    if missing:
        raise ValueError(f"The weights of {name} lack {len(missing)} tensors of the model, such as {missing[0]}.")
    return model.eval(), words


def quiet_loading() -> None:
    """No progress bars of the loader, which would mix with our output."""
    try:
        from transformers.utils import logging
    except ModuleNotFoundError:
        return  # the loader names the extra
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model's folder, of which nothing is run."""
    try:
        return _transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its many readers do
        first = " ".join(str(error).split())[:300]
        raise ValueError(f"{folder} has no tokenizer that could be read: {first}") from None


def _stream(folder: Path, config: Any, architecture: Architecture) -> nn.Module | None:
    """The model with its layers streamed from the folder, if that is possible."""
    if getattr(config, "quantization_config", None) is not None:
        return None  # only the library knows how to unpack its weights
    made: Any = getattr(_transformers(), architecture.model_class)
    make = getattr(made, "from_config", None) or made._from_config
    return stream_layers(
        folder, lambda: make(config, attn_implementation="eager", dtype=torch.float32), architecture.layers
    )


def longest_text(model: nn.Module) -> int:
    """The most tokens that a model has places for; RoBERTa and its kin count them from behind the padding's."""
    limit: int = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    places = part(model, "embeddings.position_embeddings")
    if isinstance(places, nn.Embedding) and places.padding_idx is not None:
        limit = min(limit, places.num_embeddings - places.padding_idx - 1)
    return limit


def _check_folder(folder: Path) -> None:
    if not is_there(folder / "config.json"):
        raise ValueError(f"{folder} is not a model folder: it has no config.json.")
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if pickled:
            raise ValueError(
                f"{folder} has only pickled weights ({pickled[0]}), which could run code; convert them to safetensors."
            )
        raise ValueError(f"{folder} has no weights: a .safetensors file is needed.")


def _looks_like_hub_name(name: str) -> bool:
    pieces = name.split("/")
    return 1 <= len(pieces) <= 2 and all(p and p[0].isalnum() for p in pieces) and not name.startswith((".", "~"))


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise ModuleNotFoundError("The lens needs transformers: pip install 'headcode[hf]'.") from None
    return transformers
