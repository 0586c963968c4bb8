"""The hypernetwork inside attention, on a small random model.

Takes one HYLA layer and shows, for one query, the code of every key, the network that each code generates, and that
these networks, applied to the keys' tokens and summed, are exactly the layer's output. Writes a picture.

Example: headcode demo --method softmax
"""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headcode.nn import HyperAttention, capture_codes, value_network
from headcode.ops import METHODS

BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclasses.dataclass(frozen=True)
class Command:
    """Arguments of `headcode demo`."""

    method: str = "hyla"
    """softmax, linear, linear_rms, hyla, …"""
    seed: int = 0
    out: Path = Path("out/demo")
    """Folder for the picture."""

    def run(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"--method must be one of {', '.join(METHODS)}, got {self.method!r}.")
        torch.manual_seed(self.seed)
        dim, heads, length = 16, 8, 6
        layer = HyperAttention(dim, heads, method=self.method, v_dim=8 * heads).double()
        for bias in (layer.value_proj.bias, layer.output_proj.bias):
            torch.nn.init.normal_(bias, std=0.1)
        x = torch.randn(1, length, dim, dtype=torch.float64)
        with torch.no_grad(), capture_codes(layer) as captured:
            output = layer(x)
        codes = captured[0]
        with torch.no_grad():
            networks = value_network(layer, codes)
            contributions = networks(x[:, None])  # (1, query, key, dim)
            rebuilt = contributions.sum(2) + layer.output_proj.bias
        error = (rebuilt - output).abs().max().item()
        self._tell(codes, contributions, error)
        shown = (codes.numpy(), networks.weights[0].numpy(), contributions.numpy(), output.numpy())
        path = draw(*shown, self.method, self.out)
        print(f"\nPicture: {path}")
        print("Next: headcode info --help, and `from headcode import HyperAttention` in your own model.")

    def _tell(self, codes: Tensor, contributions: Tensor, error: float) -> None:
        heads, query = codes.shape[1], codes.shape[2] - 1
        norm, value_net, _ = METHODS[self.method]
        print(f"Attention as a hypernetwork: {self.method} (norm {norm}, value net {value_net}), seed {self.seed}\n")
        print(f"Query {query}. The scores it gives a key across {heads} heads are the key's code; the code configures")
        print("the network that turns the key's token into a contribution.\n")
        print(f"{'key':>3}  {'code (one bar a head)':<24} {'as numbers':<{7 * heads}}  size of contribution")
        for key in range(codes.shape[3]):
            code = codes[0, :, query, key]
            numbers = " ".join(f"{value:+.2f}" for value in code.tolist())
            size = contributions[0, query, key].norm().item()
            print(f"{key:>3}  {_bars(code):<24} {numbers:<{7 * heads}}  {size:.3f}")
        print(f"\nSum of all generated networks applied to their tokens, against the layer's output: {error:.1e}")


def _bars(code: Tensor) -> str:
    top = code.abs().max().clamp(min=1e-9)
    return " ".join(BLOCKS[round((value / top).item() * (len(BLOCKS) - 1))] for value in code.abs())


def draw(
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
        axes[0, key].bar(range(1, len(code) + 1), code, color=["#0072B2" if z >= 0 else "#D55E00" for z in code])
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
