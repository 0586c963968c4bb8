"""Models as folders: `config.json` and `model.safetensors`, nothing that can run code."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from headcode.files import is_there, read_object, replace_file
from headcode.nn.config import ModelConfig
from headcode.nn.models import make_model, model_config
from headcode.nn.transformer import Transformer

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def save_model(model: Transformer, folder: str | Path) -> Path:
    """Write the model's config and weights; each file appears whole or not at all.

    A model with adapters has other weights than its config says, and is refused: merge them first.
    """
    from safetensors.torch import save

    folder = Path(folder)
    if unknown := set(model.state_dict()) ^ set(_skeleton(model.config).state_dict()):
        raise ValueError(
            f"The model's weights are not those of its config ({min(unknown)}): merge or remove its adapters and "
            f"parametrisations before saving, for example with merge_and_unload()."
        )
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}
    replace_file(folder / WEIGHTS_FILE, save(state))
    replace_file(folder / CONFIG_FILE, model.config.to_json().encode())
    return folder


def load_model(folder: str | Path) -> Transformer:
    """The model that `save_model` wrote, in evaluation mode."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not is_there(folder / name):
            raise ValueError(f"{folder} is not a model folder: it has no {name}.")
    config = model_config(read_object(folder / CONFIG_FILE))
    try:
        state = load_file(folder / WEIGHTS_FILE)
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS_FILE} is damaged: {error}.") from None
    dtype = check_weights(_skeleton(config), state, folder / WEIGHTS_FILE)  # before memory is taken for the model
    model = make_model(config).to(dtype)
    model.load_state_dict(state)
    return model.eval()


def _skeleton(config: ModelConfig) -> Transformer:
    """The names and shapes of a model, without memory for its numbers."""
    with torch.device("meta"):
        return make_model(config)


def check_weights(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> torch.dtype:
    """The weights of a file are those of this model, by name and shape, and have one dtype, which is returned."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if expected != found:
        wrong = sorted(set(expected.items()) ^ set(found.items()))[0][0]
        raise ValueError(f"{path} does not belong to its {CONFIG_FILE}: {wrong:.200} differs.")
    dtypes = {tensor.dtype for tensor in state.values()}
    if len(dtypes) != 1 or not (dtype := dtypes.pop()).is_floating_point:
        raise ValueError(f"{path} must hold floating-point numbers of one kind.")
    return dtype
