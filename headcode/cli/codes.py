"""Capture the codes of a trained run over any split, streamed to disk with labels, predictions and correctness.

Example: headcode codes runs/first --split compositional --size 50000 --keys all --out codes.npz

A map of them, coloured by rule or term: headcode codes runs/first --map tsne
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from headcode.cli._training import Switch

Numbers = Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="N …", help_behavior_hint="(optional)")]


@dataclasses.dataclass(frozen=True)
class Command:
    """Arguments of `headcode codes`."""

    run_folder: tyro.conf.Positional[Path]
    """The run folder."""
    split: str = "compositional"
    """train, iid, compositional, or novel (fuzzy logic)."""
    size: int = 4096
    """How many instances."""
    start: int = 0
    """Number of the first instance."""
    layers: Numbers = None
    """Layers, counted from 0; negative numbers count from the end. All unless given."""
    queries: Numbers = None
    """Query positions; the tokens whose outputs are read unless given."""
    keys: Annotated[tuple[str, ...], tyro.conf.arg(metavar="self|all|N …", help_behavior_hint="(optional)")] = ()
    """self (each query's code to itself), all, or key positions. Unless given, all with cross-attention, on graphs the
    last step of the path, and else self."""
    checkpoint: str = "last"
    """last, best, a name such as step-500, or untrained (the weights before the first step)."""
    inputs: Literal["uniform", "fixed_context", "fixed_query"] | None = None
    """Fuzzy logic: which points all sequences share; as in training unless given."""
    authors: Switch = False
    """The codes that the paper's authors take, in place of --queries, --keys and --inputs: on SRAVEN puzzles without
    permutations, of the last answering token to its own feature in the other panels of its row."""
    residual: Switch = False
    """Also keep the residual stream after each layer, at the queries."""
    batch_size: int = 256
    """Instances at a time; memory holds one batch."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(optional)")] = None
    """A .npz or .parquet file; RUN/codes.npz unless given."""
    map: Literal["tsne", "pca", "umap"] | None = None
    """Also lay the codes out in the plane: OUT-MAP-layerN.npz and figures beside it."""
    map_size: int = 2000
    """How many codes a map has."""
    seed: int = 0
    """Seed of the map."""

    def run(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        from headcode.analysis.authors import as_authors
        from headcode.analysis.codes import capture
        from headcode.analysis.runs import open_run

        check_authors(self.authors, self.queries, self.keys, self.inputs)
        run = open_run(self.run_folder, self.checkpoint, inputs=self.inputs)
        pairs: dict[str, Any] = {"queries": self.queries, "keys": parse_keys(self.keys)}
        if self.authors:
            run, pairs = as_authors(run)
        out = self.run_folder / "codes.npz" if self.out is None else self.out
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
            work = bar.add_task("capturing codes", total=self.size)
            codes = capture(
                run,
                self.split,
                out,
                size=self.size,
                start=self.start,
                layers=self.layers,
                **pairs,
                residual=self.residual,
                batch_size=self.batch_size,
                progress=lambda done: bar.advance(work, done),
            )
        layers, shape = codes.card["layers"], codes[f"codes_layer_{codes.card['layers'][0]}"].shape
        print(f"wrote {out} ({out.stat().st_size:,} bytes)")
        print(f"  {shape[0]:,} instances of {self.split}, {shape[1]} (query, key) pairs, {shape[2]} heads")
        print(f"  layers {', '.join(map(str, layers))}; step {run.step}; solved {float(codes['correct'].mean()):.3f}")
        if self.map is not None:
            self._draw(codes, out, layers, run.task.label_kind)

    def _draw(self, codes, out: Path, layers: list[int], kind: str) -> None:  # type: ignore[no-untyped-def]
        from headcode.analysis.files import open_arrays
        from headcode.analysis.maps import make_map
        from headcode.report.figures import code_map

        assert self.map is not None
        for layer in layers:
            path = out.with_name(f"{out.stem}-{self.map}-layer{layer}.npz")
            try:
                make_map(codes, path, layer=layer, method=self.map, size=self.map_size, seed=self.seed)
            except ValueError as nothing:
                print(f"no map of layer {layer}: {nothing}")
                continue
            # Tokens whose outputs are not read have no target.
            labels = open_arrays(path)
            colours = dict.fromkeys(("rule", "term", kind, "target", "correct"))
            for colour in (name for name in colours if name in labels):
                stem = out.parent / "figures" / f"{path.stem}-{colour}"
                drawn = code_map({f"layer {layer}": path}, stem, colour)
                print(f"wrote {', '.join(map(str, drawn))}")


def check_authors(authors: bool, *instead: object) -> None:
    """Refuse the authors' choice of codes beside another one."""
    if authors and any(instead):
        raise ValueError("--authors says itself which codes count: leave out --queries, --keys and --inputs.")


def parse_keys(words: tuple[str, ...]) -> str | list[int] | None:
    """`self`, `all`, or positions, from the words of a flag; None without any."""
    if not words:
        return None
    if len(words) == 1 and words[0] in ("self", "all"):
        return words[0]
    try:
        return [int(word) for word in words]
    except ValueError:
        raise ValueError(f"--keys takes self, all or positions, got {' '.join(words)!r}.") from None
