"""What a checkpoint is: parameters, shapes and FLOPs per token.

CHECKPOINT is a run folder, one of its checkpoints, a model of the zoo, or an .npz file of the authors' parameters.

Example: headcode info zoo/logic-hyla
         headcode info params.npz --method hyla --length 36
"""

import dataclasses
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

import headcode

if TYPE_CHECKING:  # the help of a command needs no torch
    from headcode.nn import Transformer


@dataclasses.dataclass(frozen=True)
class Command:
    """Arguments of `headcode info`."""

    checkpoint: tyro.conf.Positional[Path]
    """A run folder, a checkpoint, a model of the zoo, or an .npz file of the authors' parameters."""
    method: str = "hyla"
    """For .npz files, which do not tell: softmax, linear, hyla, …"""
    causal: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """For .npz files, which do not tell: the model has a causal mask."""
    length: int | None = None
    """Sequence length for the FLOPs; the model's full length unless given."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object."""

    def run(self) -> None:
        if self.length is not None and not 1 <= self.length <= 10**9:
            raise ValueError(f"--length must be at least 1 and at most a billion, got {self.length}.")
        facts = describe(self._load(), self.length)
        print(json.dumps(facts, indent=2) if self.json else _table(facts))

    def _load(self) -> "Transformer":
        from headcode.interop import load_reference

        if self.checkpoint.is_file():
            return load_reference(self.checkpoint, method=self.method, causal=self.causal)
        return headcode.load(self.checkpoint)


def describe(model: "Transformer", length: int | None = None) -> dict[str, Any]:
    """Everything `headcode info` prints, as plain data."""
    from headcode.nn import flops_per_token

    return {
        "config": model.config.to_dict(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "length": length or model.config.max_length,
        "flops_per_token": flops_per_token(model.config, length),
        "shapes": {name: list(parameter.shape) for name, parameter in model.named_parameters()},
    }


def _table(facts: dict[str, Any]) -> str:
    config = facts["config"]
    width = max(map(len, facts["shapes"]))
    shapes = [f"  {name:<{width}}  {' × '.join(map(str, shape))}" for name, shape in facts["shapes"].items()]
    chosen = {name: value for name, value in config.items() if value is not None}
    return "\n".join(
        [
            f"parameters       {facts['parameters']:,}",
            f"FLOPs per token  {facts['flops_per_token']:,.0f} (forward, length {facts['length']})",
            _folded("config           ", [f"{name}={value}" for name, value in chosen.items()]),
            "shapes",
            *shapes,
        ]
    )


def _folded(title: str, words: list[str]) -> str:
    """Words with commas between, in lines that fit 80 columns, the title before the first."""
    between = " " * len(title)
    return textwrap.fill(title + ", ".join(words), 80, subsequent_indent=between, break_on_hyphens=False)
