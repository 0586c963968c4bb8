"""A pretrained model whose layers are in memory only while they are computed.

`stream_layers` builds the model without weights and reads those outside of its layers: embeddings and last norm. A
hook before each layer reads the layer's own, and one behind it drops them, so that a forward pass holds the embeddings
and one layer, however deep the model is. `untrained` is the same model with weights as before any training.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Fill = Callable[[nn.Module, str], None]
"""Puts weights into a part of the model, given the part and its path."""

_UNUSED = "pooler."
"""Weights that a file may lack: attention does not come to them."""


class StoredTensors:
    """The tensors of all safetensors files of a folder, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._open = safe_open
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - no dictionary
                    self._files.setdefault(name, file)
                    self._shapes.setdefault(name, tuple(opened.get_slice(name).get_shape()))

    def find(self, parameter_names: list[str], shape: tuple[int, ...], prefix: str) -> str | None:
        """What the files call a parameter that the model knows by one or several names."""
        spellings = itertools.chain.from_iterable((name, f"{prefix}.{name}") for name in parameter_names)
        return next((name for name in spellings if self._shapes.get(name) == shape), None)

    def read(self, name: str) -> Tensor | None:
        """A tensor in float32, or None."""
        if name not in self._files:
            return None
        with self._open(self._files[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor.float().clone()  # of our own: not a view of the mapped file


def stream_layers(folder: Path, make: Callable[[], Any], layers: str) -> nn.Module | None:
    """The model of a folder, its layers (the path to their list) streamed; None if the files name tensors otherwise."""
    stored = StoredTensors(folder)
    model = _without_weights(make)
    names: dict[int, list[str]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        shapes[id(parameter)] = tuple(parameter.shape)
    spelled: dict[str, str] = {}
    for key, group in names.items():
        found = stored.find(group, shapes[key], model.base_model_prefix)
        if found is not None:
            spelled.update(dict.fromkeys(group, found))
        elif not all(name.startswith(_UNUSED) for name in group):
            return None

    resident: dict[str, nn.Parameter] = {}

    def fill(part: nn.Module, path: str) -> None:
        read = {} if path.startswith(f"{layers}.") else resident
        for name, parameter in list(part.named_parameters(remove_duplicate=False)):
            full = f"{path}.{name}" if path else name
            source = spelled.get(full, "")
            if source not in read:  # tied weights stay one tensor
                tensor = stored.read(source)
                tensor = torch.zeros(parameter.shape) if tensor is None else tensor
                read[source] = nn.Parameter(tensor, requires_grad=False)
            _put(part, name, read[source])

    _install(model, layers, fill)
    if any(p.is_meta for name, p in model.named_parameters() if not name.startswith(f"{layers}.")):
        return None  # a parameter beside the layers, in no part of its own
    model.stored_tensors = stored
    return model


def untrained(model: Any, layers: str, seed: int) -> Any:
    """The same model before any training; streamed if `model` is. Seeded, and torch's own generator stays as it was."""
    config = copy.deepcopy(model.config)
    if getattr(model, "stored_tensors", None) is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return type(model)(config).float().eval()
    other = _without_weights(lambda: type(model)(config))

    def fill(part: nn.Module, path: str) -> None:
        for name, parameter in list(part.named_parameters()):
            _put(part, name, nn.Parameter(torch.zeros(parameter.shape), requires_grad=False))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(_seed_of(path, seed))
            for module in part.modules():
                if not _is_empty(module):
                    other._init_weights(module)

    _install(other, layers, fill)
    return other.eval()


def _without_weights(make: Callable[[], Any]) -> Any:
    """A model whose parameters take no memory; its buffers (positions, rotary frequencies) are real."""
    with torch.device("meta"):
        model = make()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    model.initialize_weights()  # also computes the buffers
    return model.eval()


def _install(model: Any, layers: str, fill: Fill) -> None:
    """Fill what is outside of the layers now, and each layer when it is called."""
    blocks = list(model.get_submodule(layers))
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    empty = {f"{layers}.{number}": block for number, block in enumerate(blocks)}
    for path, module in list(_outermost(model, inside)):
        fill(module, path)
    for path, block in empty.items():

        def enter(block: nn.Module, arguments: Any, path: str = path) -> None:
            fill(block, path)

        def leave(block: nn.Module, arguments: Any, result: Any) -> None:
            for name, parameter in list(block.named_parameters(remove_duplicate=False)):
                _put(block, name, nn.Parameter(parameter.to("meta"), requires_grad=False))

        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)


def _outermost(model: nn.Module, inside: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """The largest parts that have no parameter of a layer."""
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        parameters = list(module.parameters())
        if parameters and not any(id(parameter) in inside for parameter in parameters):
            yield path, module
        else:
            waiting += [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]


def _put(part: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    part.get_submodule(owner)._parameters[leaf] = parameter


def _is_empty(module: nn.Module) -> bool:
    return not any(True for _ in module.parameters())


def _seed_of(path: str, seed: int) -> int:
    """Different for every part, the same on every machine."""
    return seed + sum((place + 1) * ord(letter) for place, letter in enumerate(path))
