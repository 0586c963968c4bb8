"""The hypernetwork inside one small random attention layer, in words and as a picture."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headcode.nn import HyperAttention, capture_codes, value_network
from headcode.ops import METHODS

BLOCKS = " ▁▂▃▄▅▆▇█"


class Opened(NamedTuple):
    """One attention layer, taken apart: codes, generated first-layer weights, contributions, output, and the error."""

    codes: Tensor
    weights: Tensor
    contributions: Tensor
    output: Tensor
    error: float


def open_layer(method: str, seed: int) -> Opened:
    """For every query and key of a random layer: the code, the network that it generates, and its contribution."""
    torch.manual_seed(seed)
    dim, heads, length = 16, 8, 6
    layer = HyperAttention(dim, heads, method=method, v_dim=8 * heads, pooling="sum").double()
    for bias in (layer.value_proj.bias, layer.output_proj.bias):
        torch.nn.init.normal_(bias, std=0.1)
    x = torch.randn(1, length, dim, dtype=torch.float64)
    with torch.no_grad(), capture_codes(layer) as captured:
        output = layer(x)
    with torch.no_grad():
        networks = value_network(layer, captured[0])
        contributions = networks(x[:, None])  # (1, query, key, dim)
        rebuilt = contributions.sum(2) + layer.output_proj.bias
    error = (rebuilt - output).abs().max().item()
    return Opened(captured[0], networks.weights[0], contributions, output, error)


def in_words(opened: Opened, method: str) -> str:
    """The last query's codes as bars and numbers, and that the generated networks sum up to the layer's output."""
    codes, contributions = opened.codes, opened.contributions
    heads, query = codes.shape[1], codes.shape[2] - 1
    norm, value_net, _ = METHODS[method]
    lines = [
        f"One {method} layer (norm {norm}, value net {value_net}), random weights, query {query}. The scores that it",
        f"gives a key across {heads} heads are the key's code; the code configures the network that turns the key's",
        "token into a contribution.",
        "",
        f"{'key':>3}  {'code, one bar a head':<22} size of contribution",
    ]
    for key in range(codes.shape[3]):
        size = contributions[0, query, key].norm().item()
        lines.append(f"{key:>3}  {_bars(codes[0, :, query, key]):<22} {size:.3f}")
    lines.append(f"All generated networks applied and summed, against the layer's output: {opened.error:.0e} apart.")
    return "\n".join(lines)


def _bars(code: Tensor) -> str:
    top = code.abs().max().clamp(min=1e-9)
    return " ".join(BLOCKS[round((value / top).item() * (len(BLOCKS) - 1))] for value in code.abs())


def draw_opened(opened: Opened, method: str, folder: Path) -> Path:
    """Code, generated first-layer weights and contribution of every key, for the last query."""
    codes, weights, contributions, output = (t.numpy() for t in opened[:4])
    return _draw(codes, weights, contributions, output, method, folder)


def _draw(
    codes: np.ndarray, weights: np.ndarray, contributions: np.ndarray, output: np.ndarray, method: str, folder: Path
) -> Path:
    """Code, generated first-layer weights and contribution of every key, for the last query."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    keys, query = codes.shape[3], codes.shape[2] - 1
    figure, axes = plt.subplots(3, keys, figsize=(1.5 * keys + 1.2, 6.2), height_ratios=[1, 1.6, 1], squeeze=False)
    code_limit = 1.1 * abs(codes[0, :, query]).max()
    weight_limit = abs(weights[0, query]).max()
    size_limit = 1.1 * abs(contributions[0, query]).max()
    for key in range(keys):
        code, weight = codes[0, :, query, key], weights[0, query, key]
        axes[0, key].bar(range(len(code)), code, color=["#0072B2" if z >= 0 else "#D55E00" for z in code])
        axes[0, key].set(ylim=(-code_limit, code_limit), title=f"key {key}")
        axes[1, key].imshow(weight, cmap="RdBu_r", vmin=-weight_limit, vmax=weight_limit, aspect="auto")
        axes[2, key].bar(range(len(output[0, query])), contributions[0, query, key], color="#009E73")
        axes[2, key].set(ylim=(-size_limit, size_limit))
        for row in range(3):
            axes[row, key].axhline(0, color="0.6", linewidth=0.6) if row != 1 else None
            axes[row, key].set(xticks=[], yticks=[])
    for row, label in enumerate(
        ["code\n(one bar a head)", "generated weights\n(first layer)", "contribution\nto the output"]
    ):
        axes[row, 0].set_ylabel(label)
    figure.suptitle(f"One query, {keys} keys: each code configures its own network ({method})")
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "hypernetwork.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
