"""What the codes of a pretrained transformer separate, as one page: every layer read as a hypernetwork.

MODEL is a folder with config.json and safetensors weights, a name on the Hugging Face hub (both need headcode[hf]), or
a run of a language model of headcode's. The page needs nothing else: no network, no scripts.

Example: headcode lens path/to/bert --text story.txt --out lens.html
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro

from headcode.cli._training import Switch, print_json
from headcode.cli.codes import Numbers
from headcode.files import (
    LARGEST_TEXT,
    is_there,
    read_beginning,
    read_npz,
    replace_file,
    temporary_folder,
    to_json,
)

SHORTEST_BEGINNING, LONGEST_TOKEN = 2**20, 2**10
"""Bytes of a text that are read whatever its size, and per token: what is cut at --max-tokens need not be read."""
MOST_TOKENS_OF_DATA = 128
"""Of a text whose codes are written to --data whole."""


@dataclasses.dataclass(frozen=True)
class Command:
    """Arguments of `headcode lens`."""

    model: tyro.conf.Positional[str]
    """A model folder, a hub name, or a run folder."""
    text: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(optional)")] = None
    """A text file (UTF-8), read sentence by sentence; eight or more sentences."""
    images: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(optional)")] = None
    """For a model that sees images (ViT): an .npz file whose `images` are pixels (N, channels, height, width)."""
    layers: Numbers = None
    """Layers, counted from 0; all unless given."""
    max_texts: int = 64
    """Sentences; of a longer text as many, spread evenly over it."""
    max_tokens: int = 64
    """A longer sentence is cut here."""
    built: int = 96
    """Minimal pairs of built sentences for each of the four syntactic relations."""
    patched: int = 24
    """Sentences that work with another's codes, layer by layer."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(optional)")] = None
    """Also a folder for study.json, every number of the page, and for the beginning of the text codes.npz, lens.json
    and a figure."""
    pairs: int = 16
    """With --data: (query, key) pairs whose effective rank is computed, per layer."""
    networks: Annotated[tuple[int, ...], tyro.conf.arg(metavar="Q K …")] = ()
    """With --data: pairs whose generated W[q,k] is written to networks.npz: query key query key …"""
    seed: int = 0
    """Of what is drawn: pairs, folds, built sentences, untrained weights."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("lens.html")
    """The page to write."""
    json: Switch = False
    """Print one JSON object: the study."""

    def run(self) -> None:
        from headcode.analysis.lens import open_model, study_model
        from headcode.interop.huggingface import quiet_loading
        from headcode.report.lens import layer_sentences, lens_page, not_asked

        source, given = self._read_input()
        if self.out.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"The page's name ends in .html, got {self.out.name!r}; --data takes a folder.")
        if self.networks and self.data is None:
            raise ValueError("--networks are written to --data, which takes a folder.")
        if self.pairs < 1:
            raise ValueError(f"pairs must be 1 or more, got {self.pairs}.")
        quiet_loading()
        opened = open_model(self.model, reads_text=self.text is not None)
        counts = {name: getattr(self, name) for name in ("max_texts", "max_tokens", "built", "patched", "seed")}
        result = study_model(opened, given, layers=self.layers, progress=_tell(self.json), **counts)
        if self.data is not None:
            self.data.mkdir(parents=True, exist_ok=True)
            replace_file(self.data / "study.json", to_json(result))
            if isinstance(given, str):
                self._write_data(opened, given)
        with temporary_folder("lens") as pictures:
            page = lens_page(result, source, self.out, pictures)
        if self.json:
            print_json(result)
            return
        for sentence in (*layer_sentences(result["separation"]), *not_asked(result["card"])):
            print(sentence)
        for number, reason in result["unreadable"].items():
            print(f"Layer {number} cannot be read: {reason}")
        worst = max(layer["relative_error"] for layer in result["layers"])
        print(f"{opened.name}: {opened.num_heads} heads, largest relative error of the reading {worst:.0e}")
        print(f"wrote {page}")

    def _read_input(self) -> tuple[str, Any]:
        """What the page says of its source, and the text or the images."""
        if (self.text is None) == (self.images is None):
            raise ValueError("Give --text FILE, or --images FILE for a model that sees images.")
        if self.images is not None:
            import torch

            if not is_there(self.images):
                raise ValueError(f"{self.images} does not exist; --images takes an .npz file.")
            found = read_npz(self.images)
            if "images" not in found or found["images"].ndim != 4 or found["images"].dtype.kind != "f":
                raise ValueError(f"{self.images} must have floating `images` of shape (N, channels, height, width).")
            return self.images.name, torch.tensor(found["images"], dtype=torch.float32)
        assert self.text is not None
        if not is_there(self.text):
            raise ValueError(f"{self.text} does not exist; --text takes a text file.")
        bytes_read = min(max(SHORTEST_BEGINNING, LONGEST_TOKEN * self.max_tokens), LARGEST_TEXT)
        return self.text.name, read_beginning(self.text, bytes_read)

    def _write_data(self, opened: Any, text: str) -> None:
        """The beginning of the text as one sequence: codes, numbers by layer, a figure, chosen networks."""
        from headcode.analysis.kinds import cluster_by_kind
        from headcode.analysis.lens import TOLERANCE, read_model, summarise, write_networks, write_reading
        from headcode.report.figures import lens_layers

        assert self.data is not None
        reading = read_model(opened, text, layers=self.layers, max_tokens=MOST_TOKENS_OF_DATA)
        rows = [
            {**summarise(layer, pairs=self.pairs, seed=self.seed), **cluster_by_kind(layer.codes, reading.kinds)}
            for layer in reading.layers
        ]
        card = {
            "what": "lens",
            "model": self.model,
            "tokens": reading.tokens,
            "kinds": reading.kinds,
            "unreadable": {str(layer): reason for layer, reason in reading.unreadable.items()},
            "tolerance": TOLERANCE,
            "seed": self.seed,
        }
        if self.networks:
            write_networks(reading, self.networks, self.data / "networks.npz", card)
        write_reading(reading, self.data / "codes.npz", card)
        replace_file(self.data / "lens.json", to_json({"card": card, "rows": rows}))
        if all(layer.is_linear for layer in reading.layers):
            lens_layers(self.data / "lens.json", self.data / "lens")


def _tell(silent: bool) -> Any:
    """Prints what is done next, or nothing."""
    return (lambda words: None) if silent else (lambda words: print(f"{words} …", flush=True))
