"""Decode terms or rules from the codes of a run, on held-out compositions and against controls.

Example: headcode decode runs/first --keys self

Interventions instead of decoders: headcode decode runs/first --patch (or --ablate, --likeness, --training).
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from headcode.cli._progress import shown
from headcode.cli._tables import aligned_table
from headcode.cli._training import Switch, print_json
from headcode.cli.codes import Numbers, check_authors, parse_keys


@dataclasses.dataclass(frozen=True)
class Found:
    """What a reading of the codes gave, and how it is told."""

    result: dict[str, Any]
    title: str
    rows: Sequence[dict[str, Any]]
    columns: Sequence[str]
    paths: Sequence[Path]

    def tell(self) -> None:
        print(self.title)
        print(aligned_table({column: [_cell(row[column]) for row in self.rows] for column in self.columns}))
        for path in self.paths:
            print(f"wrote {path}")


@dataclasses.dataclass(frozen=True)
class Command:
    """Arguments of `headcode decode`."""

    run_folder: tyro.conf.Positional[Path]
    """The run folder."""
    layers: Numbers = None
    """Layers, counted from 0; all unless given."""
    keys: Annotated[tuple[str, ...], tyro.conf.arg(metavar="self|all|N …", help_behavior_hint="(optional)")] = ()
    """Whose codes count: each answering token's to itself (the default), to all keys (that of --patch, and with
    cross-attention), or to some positions (on graphs by default the last step of the path)."""
    split: str = "compositional"
    """Where decoders are tested; they are fitted on fresh samples of the training compositions (iid)."""
    inputs: Literal["uniform", "fixed_context", "fixed_query"] | None = None
    """Fuzzy logic: which points all sequences share; unless given, fixed_context for decoders and likeness, and as in
    training for --patch and --ablate."""
    authors: Switch = False
    """For decoders and --likeness, the codes that the paper's authors take, in place of --keys and --inputs: on SRAVEN
    puzzles without permutations, of the last answering token to its own feature in the other panels of its row."""
    checkpoint: str = "last"
    """last, best or a name such as step-500."""
    size: int = 4096
    """Instances to fit on, and to test on."""
    seed: int = 0
    """Of folds, shuffles, bootstrap and donors."""
    controls: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME …")] = (
        "shuffled",
        "untrained",
        "position",
        "residual",
    )
    """Controls to compute; none after the flag means none."""
    patch: Switch = False
    """Put donors' codes into recipients and count the answers that follow; writes patch.json and .csv."""
    ablate: Switch = False
    """Take out every head in turn; writes ablate.json and .csv."""
    likeness: Switch = False
    """Cosine similarity of mean codes, training against held-out compositions; writes likeness-layerN.npz."""
    training: Switch = False
    """Decode at every checkpoint; writes training.json, .csv and .npz."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(optional)")] = None
    """Folder for results and figures; RUN/analysis unless given."""
    json: Switch = False
    """Print one JSON object."""

    def run(self) -> None:
        check_authors(self.authors, self.keys, self.inputs)
        out = self.run_folder / "analysis" if self.out is None else self.out
        wanted = [name for name in ("patch", "ablate", "likeness", "training") if getattr(self, name)]
        if self.authors and (other := [name for name in wanted if name != "likeness"]):
            raise ValueError(f"--authors is for decoders and --likeness: leave it out with --{other[0]}.")
        printed = {}
        for name in wanted or ["decode"]:
            with shown(name) as progress:
                found = getattr(self, f"_{name}")(out, progress)
            printed[name] = found.result
            if not self.json:
                found.tell()
        if self.json:
            print_json(printed if wanted else printed["decode"])

    def _decode(self, out: Path, progress: Any) -> Found:
        from headcode.analysis.decode import decode, write_decoding
        from headcode.report import figures

        result = decode(
            self.run_folder,
            checkpoint=self.checkpoint,
            test_splits=(self.split,),
            layers=self.layers,
            keys=self._keys(),
            inputs=self._inputs(),
            authors=self.authors,
            fit_size=self.size,
            test_size=self.size,
            controls=self.controls,
            seed=self.seed,
            progress=progress,
        )
        paths = write_decoding(result, out)
        card = result["card"]
        drawn = figures.decoding({card["method"]: paths[0]}, out / "figures" / "decode")
        title = f"{card['method']} on {card['task']}, step {card['step']}: decoding on {self.split}"
        columns = ("layer", "source", "subset", "macro_f1", "macro_f1_low", "macro_f1_high", "accuracy")
        return Found(result, title, result["rows"], columns, [*paths, *drawn])

    def _patch(self, out: Path, progress: Any) -> Found:
        from headcode.analysis.decode import write_decoding
        from headcode.analysis.patch import patch
        from headcode.analysis.runs import open_run
        from headcode.report import figures

        keys = parse_keys(self.keys) or "all"
        rows = patch(
            self.run_folder,
            checkpoint=self.checkpoint,
            layers=self.layers,
            keys=keys if isinstance(keys, str) else " ".join(self.keys),
            inputs=self.inputs,
            split=self.split,
            size=self.size,
            seed=self.seed,
            progress=progress,
        )
        facts = open_run(self.run_folder, self.checkpoint, inputs=self.inputs).facts()
        card = {**facts, "what": "patching", "split": self.split, "size": self.size, "donor_seed": self.seed}
        result = {"card": card, "rows": rows}
        paths = write_decoding(result, out, "patch")
        drawn = figures.patching({facts["method"]: paths[0]}, out / "figures" / "patch")
        columns = ("donor", "control", "layer", "follows", "stays", "copies", "pairs")
        return Found(result, f"{facts['method']} on {facts['task']}: patched codes", rows, columns, [*paths, *drawn])

    def _ablate(self, out: Path, progress: Any) -> Found:
        from headcode.analysis.ablate import ablate
        from headcode.analysis.decode import write_decoding
        from headcode.analysis.runs import open_run
        from headcode.report import figures

        run = open_run(self.run_folder, self.checkpoint, inputs=self.inputs)
        rows = ablate(run, split=self.split, size=self.size, layers=self.layers, progress=progress)
        result = {"card": {**run.facts(), "what": "ablation", "split": self.split, "size": self.size}, "rows": rows}
        paths = write_decoding(result, out, "ablate")
        drawn = figures.head_ablation({run.config.model.method: paths[0]}, out / "figures" / "ablate")
        metrics = [name for name in rows[0] if name not in ("layer", "head", "mode")]
        columns = ("layer", "head", *metrics)
        return Found(result, f"{run.config.model.method}: heads taken out", rows, columns, [*paths, *drawn])

    def _likeness(self, out: Path, progress: Any) -> Found:
        from headcode.analysis.authors import as_authors
        from headcode.analysis.codes import capture, layers_of
        from headcode.analysis.files import open_arrays
        from headcode.analysis.maps import likeness
        from headcode.analysis.runs import open_run
        from headcode.files import temporary_folder
        from headcode.report import figures

        run = open_run(self.run_folder, self.checkpoint, inputs=self._inputs())
        layers = layers_of(run, self.layers)
        pairs: dict[str, Any] = {"keys": self._keys()}
        if self.authors:
            run, pairs = as_authors(run)
        options: dict[str, Any] = {"size": self.size, "layers": layers, **pairs}
        rows, paths = [], []
        with temporary_folder("likeness") as folder:
            progress("codes of iid", 0, 2)
            seen = capture(run, "iid", folder / "seen.npz", **options)
            progress(f"codes of {self.split}", 1, 2)
            held_out = capture(run, self.split, folder / "held-out.npz", **options)
            for layer in layers:
                try:
                    path = likeness(seen, held_out, out / f"likeness-layer{layer}.npz", layer=layer)
                except ValueError:  # codes that are all the same
                    rows.append({"layer": layer, "diagonal_share": None, "classes_compared": 0})
                    continue
                card = open_arrays(path).card
                rows.append({name: card[name] for name in ("layer", "diagonal_share", "classes_compared")})
                stem = out / "figures" / path.stem
                paths += [path, *figures.rule_likeness({f"layer {layer}": path}, stem)]
        title = "held-out mean codes that are most like the seen mean code of their own rule or term"
        return Found({"rows": rows}, title, rows, ("layer", "diagonal_share", "classes_compared"), paths)

    def _training(self, out: Path, progress: Any) -> Found:
        from headcode.analysis.decode import write_decoding
        from headcode.analysis.maps import along_training
        from headcode.report import figures

        layer, *more = self.layers or (-1,)
        if more:
            raise ValueError(f"--training follows one layer, got {len(more) + 1}.")
        result = along_training(
            self.run_folder,
            out,
            layer=layer,
            keys=self._keys(),
            inputs=self._inputs(),
            split=self.split,
            size=self.size,
            seed=self.seed,
            progress=progress,
        )
        paths = write_decoding(result, out, "training")
        drawn = figures.along_training({result["card"]["method"]: out / "training.npz"}, out / "figures" / "training")
        return Found(result, "codes along training", result["rows"], tuple(result["rows"][0]), [*paths, *drawn])

    def _keys(self) -> str | list[int] | None:
        return parse_keys(self.keys)

    def _inputs(self) -> str | None:
        from headcode.train.folder import read_run_config

        return self.inputs or read_run_config(self.run_folder).task.decoding_inputs


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
