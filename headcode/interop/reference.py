"""The authors' parameters, in and out: a flat mapping from their paths to arrays.

Their kernels are (in, out); those of queries, keys and values (in, head, dim), the output's (head, dim, out).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headcode.files import read_npz
from headcode.nn import ModelConfig, Transformer
from headcode.nn.checks import resolve_method
from headcode.ops import METHODS

_AUTHORS_METHODS = {method.authors_name: name for name, method in METHODS.items() if method.authors_name}


class _Entry(NamedTuple):
    """Where one of our parameters stands in the authors' tree."""

    path: str
    shape: tuple[int, ...]
    """The authors' shape; for kernels, of our transposed weight."""
    kernel: bool


def load_reference(
    params: Mapping[str, Any] | str | Path, method: str = "hyla", causal: bool = False, num_layers: int | None = None
) -> Transformer:
    """A Transformer with the authors' parameters; sizes are inferred.

    Args:
        params: the mapping, or the path of an `.npz` file that holds it.
        method: our name or the authors'; parameters do not tell.
        causal: whether the model was trained with a causal mask; parameters do not tell.
        num_layers: only for a model whose layers share one block; parameters do not tell.
    """
    arrays = _read(params)
    method = _AUTHORS_METHODS.get(method, method) if isinstance(method, str) else method
    config = _infer_config(arrays, method, causal, num_layers)
    dtype = torch.float64 if any(a.dtype == np.float64 for a in arrays.values()) else torch.float32
    model = Transformer(config).to(dtype)
    parameters = dict(model.named_parameters())
    entries = _entries(model)
    if unknown := sorted(set(arrays) - {entry.path for entry in entries.values()}):
        raise ValueError(f"The parameters have paths that this model does not know: {', '.join(unknown[:5])}.")
    with torch.no_grad():
        for name, entry in entries.items():
            array = _get(arrays, entry.path)
            if array.shape != entry.shape:
                raise ValueError(f"{entry.path} must have shape {entry.shape}, got {array.shape}.")
            tensor = torch.from_numpy(array.copy())
            parameter = parameters[name]
            parameter.copy_(tensor.reshape(parameter.T.shape).T if entry.kernel else tensor.reshape(parameter.shape))
    return model.eval()


def to_reference(model: Transformer, *, gradients: bool = False) -> dict[str, np.ndarray]:
    """The authors' flat mapping of a model's parameters, or of their gradients."""
    result = {}
    parameters = dict(model.named_parameters())
    for name, entry in _entries(model).items():
        if name not in parameters:
            raise ValueError(f"The model has no parameter {name}: merge or remove its adapters and parametrisations.")
        tensor: Tensor | None = parameters[name].grad if gradients else parameters[name]
        if tensor is None:
            raise ValueError(f"{name} has no gradient; call backward() first.")
        array = _tensor_to_array(tensor)
        result[entry.path] = np.ascontiguousarray(array.T if entry.kernel else array).reshape(entry.shape).copy()
    return result


def _entries(model: Transformer) -> dict[str, _Entry]:
    """Our parameter name -> the authors' path and shape."""
    config = model.config
    pair = resolve_method(config.method, config.norm, config.value_net)
    if pair not in {(METHODS[name].norm, METHODS[name].value_net) for name in _AUTHORS_METHODS.values()}:
        raise ValueError(f"The authors' code has no method with norm {pair[0]!r} and value net {pair[1]!r}.")
    if config.position not in ("relative", "none") or config.qk_norm or config.pooling != "sum":
        raise ValueError(
            "The authors' parameters carry position 'relative' or 'none', no qk_norm and pooling 'sum', "
            f"got {config.position!r}, {config.qk_norm} and {config.pooling!r}."
        )
    if config.cross_layers:
        raise ValueError("The authors' code has no cross-attention between context and answers: use cross_layers=0.")
    if config.num_experts > 1:
        raise ValueError("The authors' repository has no parameters of a mixture of experts: use num_experts=1.")
    if config.auxiliary_dims:
        raise ValueError("The authors' code has no heads for auxiliary targets: use auxiliary_dims=().")
    entries = {}
    if config.vocab_size is None:
        entries["embedding.weight"] = _Entry("embedding/kernel", (config.input_dim or 0, config.dim), True)
        entries["embedding.bias"] = _Entry("embedding/bias", (config.dim,), False)
    else:
        entries["embedding.weight"] = _Entry("embedding/embedding", (config.vocab_size, config.dim), False)
    for index in range(len(model.blocks)):
        path = "transformer_block" if config.share_layers else f"transformer_block_{index}"
        entries.update(_block_entries(config, f"blocks.{index}", path))
    entries["final_norm.weight"] = _Entry("decoder_norm/scale", (config.dim,), False)
    entries["final_norm.bias"] = _Entry("decoder_norm/bias", (config.dim,), False)
    if config.output_dim is not None:
        entries["output_proj.weight"] = _Entry("logitdense/kernel", (config.dim, config.output_dim), True)
        entries["output_proj.bias"] = _Entry("logitdense/bias", (config.output_dim,), False)
    return entries


def _block_entries(config: ModelConfig, name: str, path: str) -> dict[str, _Entry]:
    dim, heads = config.dim, config.num_heads
    widths = {"query": config.qk_dim // heads, "key": config.qk_dim // heads, "value": config.v_dim // heads}
    entries = {}
    for ours, theirs in (("attention_norm", "norm1"), ("feedforward_norm", "norm2")):
        entries[f"{name}.{ours}.weight"] = _Entry(f"{path}/{theirs}/scale", (dim,), False)
        entries[f"{name}.{ours}.bias"] = _Entry(f"{path}/{theirs}/bias", (dim,), False)
    for part, width in widths.items():
        projection = f"{name}.attention.{part}_proj"
        entries[f"{projection}.weight"] = _Entry(f"{path}/sequence_mixer/{part}/kernel", (dim, heads, width), True)
        entries[f"{projection}.bias"] = _Entry(f"{path}/sequence_mixer/{part}/bias", (heads, width), False)
    output = f"{name}.attention.output_proj"
    entries[f"{output}.weight"] = _Entry(f"{path}/sequence_mixer/out/kernel", (heads, widths["value"], dim), True)
    entries[f"{output}.bias"] = _Entry(f"{path}/sequence_mixer/out/bias", (dim,), False)
    if config.position == "relative":
        table = _Entry(f"{path}/relative_embedding/rel_embedding", (heads, config.max_length), False)
        entries[f"{name}.attention.relative_bias.table"] = table
    swiglu = config.feedforward == "swiglu"
    order = ("gate_proj", "signal_proj", "output_proj") if swiglu else ("hidden_proj", "output_proj")
    for number, ours in enumerate(order):
        shape = (config.mlp_dim, dim) if ours == "output_proj" else (dim, config.mlp_dim)
        dense = f"{path}/state_mixer/Dense_{number}"
        entries[f"{name}.feedforward.{ours}.weight"] = _Entry(f"{dense}/kernel", shape, True)
        if not swiglu:
            entries[f"{name}.feedforward.{ours}.bias"] = _Entry(f"{dense}/bias", shape[1:], False)
    return entries


def _infer_config(arrays: dict[str, np.ndarray], method: str, causal: bool, num_layers: int | None) -> ModelConfig:
    shared = any(path.startswith("transformer_block/") for path in arrays)
    numbers = {int(match[1]) for path in arrays if (match := re.match(r"transformer_block_(\d+)/", path))}
    if numbers != set(range(len(numbers))) or bool(numbers) == shared:
        raise ValueError(
            "The parameters must have the blocks transformer_block_0, transformer_block_1, … "
            f"(or one shared transformer_block), got the numbers {sorted(numbers)}."
        )
    if shared and num_layers is None:
        raise ValueError(
            "The parameters are of one block shared by all layers and do not tell how many: give num_layers."
        )
    if not shared and num_layers not in (None, len(numbers)):
        raise ValueError(f"num_layers is {num_layers}, but the parameters have {len(numbers)} blocks; leave it out.")
    block = "transformer_block" if shared else "transformer_block_0"
    query = _get(arrays, f"{block}/sequence_mixer/query/kernel", 3)
    value = _get(arrays, f"{block}/sequence_mixer/value/kernel", 3)
    tokens = "embedding/embedding" in arrays
    embedding = _get(arrays, "embedding/embedding" if tokens else "embedding/kernel", 2)
    table_path, output_path = f"{block}/relative_embedding/rel_embedding", "logitdense/kernel"
    table = _get(arrays, table_path, 2) if table_path in arrays else None
    output = _get(arrays, output_path, 2) if output_path in arrays else None
    return ModelConfig(
        input_dim=None if tokens else embedding.shape[0],
        vocab_size=embedding.shape[0] if tokens else None,
        output_dim=None if output is None else output.shape[-1],
        max_length=1 if table is None else table.shape[-1],
        method=method,
        dim=embedding.shape[1],
        num_layers=num_layers or len(numbers),
        share_layers=shared,
        num_heads=query.shape[1],
        qk_dim=query.shape[1] * query.shape[2],
        v_dim=value.shape[1] * value.shape[2],
        mlp_dim=_get(arrays, f"{block}/state_mixer/Dense_0/kernel", 2).shape[1],
        feedforward="swiglu" if f"{block}/state_mixer/Dense_2/kernel" in arrays else "gelu",
        position="none" if table is None else "relative",
        causal=causal,
    )


def _get(arrays: dict[str, np.ndarray], path: str, axes: int | None = None) -> np.ndarray:
    if path not in arrays:
        raise ValueError(f"The parameters lack {path}.")
    if axes is not None and arrays[path].ndim != axes:
        raise ValueError(f"{path} must have {axes} axes, got shape {arrays[path].shape}.")
    return arrays[path]


def _read(params: Mapping[str, Any] | str | Path) -> dict[str, np.ndarray]:
    if isinstance(params, (str, Path)):
        values: dict[str, Any] = dict(read_npz(params))
    elif isinstance(params, Mapping):
        values = {str(name): value for name, value in params.items()}
    else:
        raise TypeError(f"params must be a mapping from paths to arrays, or a path, got {type(params).__name__}.")
    return {name: _as_array(name, value) for name, value in values.items()}


def _as_array(name: str, value: Any) -> np.ndarray:
    """A float32 or float64 array in this machine's byte order."""
    array = _tensor_to_array(value) if isinstance(value, Tensor) else np.asarray(value)
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{name} must hold floating-point numbers, got {array.dtype}.")
    return array.astype(np.float64 if array.dtype.itemsize >= 8 else np.float32)


def _tensor_to_array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor).numpy()
