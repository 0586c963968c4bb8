"""Read a pretrained transformer's attention as a hypernetwork: codes, value networks, and the check that they add up.

MODEL is a folder with config.json and safetensors weights, or a name on the Hugging Face hub (needs headcode[hf]).

Example: headcode lens path/to/bert --text story.txt
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro

from headcode.cli._training import Switch, print_json
from headcode.cli.codes import Numbers
from headcode.files import LARGEST_TEXT, is_there, read_beginning, replace_file, to_json

SHORTEST_BEGINNING, LONGEST_TOKEN = 2**20, 2**10
"""Bytes of a text that are read whatever its size, and per token: what is cut at --max-tokens need not be read."""


@dataclasses.dataclass(frozen=True)
class Command:
    """Arguments of `headcode lens`."""

    model: tyro.conf.Positional[str]
    """A model folder, or a hub name."""
    text: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """A text file (UTF-8)."""
    layers: Numbers = None
    """Layers, counted from 0; all unless given."""
    max_tokens: int = 128
    """A longer text is cut here."""
    pairs: int = 16
    """(query, key) pairs whose effective rank is computed, per layer."""
    networks: Annotated[tuple[int, ...], tyro.conf.arg(metavar="Q K …")] = ()
    """Pairs whose generated W[q,k] is written to OUT/networks.npz: query key query key …"""
    seed: int = 0
    """Which pairs are drawn, and the seed of the clusters."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("lens")
    """Folder for codes.npz, lens.json and the figure."""
    json: Switch = False
    """Print one JSON object."""

    def run(self) -> None:
        from headcode.analysis.kinds import cluster_by_kind
        from headcode.analysis.lens import TOLERANCE, read_model, summarise, write_networks, write_reading
        from headcode.report.figures import lens_layers

        if not is_there(self.text):
            raise ValueError(f"{self.text} does not exist; --text takes a text file.")
        bytes_read = min(max(SHORTEST_BEGINNING, LONGEST_TOKEN * self.max_tokens), LARGEST_TEXT)
        text = read_beginning(self.text, bytes_read)
        _quiet_loading()
        reading = read_model(self.model, text, layers=self.layers, max_tokens=self.max_tokens)
        rows = [
            {**summarise(layer, pairs=self.pairs, seed=self.seed), **cluster_by_kind(layer.codes, reading.kinds)}
            for layer in reading.layers
        ]
        if not rows:
            number, reason = next(iter(reading.unreadable.items()))
            raise ValueError(f"No layer of {self.model} can be read; layer {number}: {reason}.")
        card: dict[str, Any] = {
            "what": "lens",
            "model": self.model,
            "tokens": reading.tokens,
            "kinds": reading.kinds,
            "unreadable": {str(layer): reason for layer, reason in reading.unreadable.items()},
            "tolerance": TOLERANCE,
            "seed": self.seed,
        }
        self.out.mkdir(parents=True, exist_ok=True)
        paths = [write_reading(reading, self.out / "codes.npz", card), self.out / "lens.json"]
        replace_file(paths[1], to_json({"card": card, "rows": rows}))
        if self.networks:
            paths.append(write_networks(reading, self.networks, self.out / "networks.npz", card))
        paths += lens_layers(paths[1], self.out / "lens")
        if self.json:
            print_json({"card": card, "rows": rows})
            return
        print(f"{self.model}: {len(reading.tokens)} tokens, {rows[0]['heads']} heads")
        print(
            "  layer   largest error  relative   reproduces  norm of W  effective rank  explained by kinds (shuffled)"
        )
        for row in rows:
            explained = row["explained"]
            print(
                f"  {row['layer']:>5}  {row['error']:>14.1e}  {row['relative_error']:>8.1e}  "
                f"{'yes' if row['reproduces'] else 'NO':>11}  {row['norm_mean']:>9.3f}  {row['rank_mean']:>14.1f}  "
                f"{explained['share']:>18.3f} ({explained['control']:.3f})"
            )
        for number, reason in reading.unreadable.items():
            print(f"  layer {number} cannot be read: {reason}")
        for path in paths:
            print(f"wrote {path}")


def _quiet_loading() -> None:
    """Progress bars of the loader would mix with the output."""
    try:
        from transformers.utils import logging
    except ModuleNotFoundError:
        return
    logging.disable_progress_bar()
    logging.set_verbosity_error()
