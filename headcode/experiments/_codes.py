"""Codes experiments: what a linear decoder reads from the codes, on seen and held-out compositions, with controls.

A decoder is fitted on fresh samples of the training compositions and tested on others of them (`seen`) and on held-out
compositions. The controls are those of `headcode.analysis.decode`: labels shuffled, the untrained network's codes, the
token's position alone, and the same decoder on the residual stream.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headcode.analysis import Decoder, OpenRun, capture, examples, make_map, open_run, score
from headcode.analysis.files import Arrays
from headcode.analysis.runs import UNTRAINED
from headcode.experiments._drawing import bars
from headcode.experiments._logic import MAIN_METHODS
from headcode.experiments.base import Experiment, Row, Study, Table, Verdict, compare, write_json
from headcode.experiments.mean import Mean, judge
from headcode.files import temporary_folder
from headcode.report import figures
from headcode.report.style import COLUMN_WIDTH, PAGE_WIDTH, PALETTE, canvas, save

SOURCES = {
    "codes": "codes",
    "untrained": "untrained\ncodes",
    "shuffled": "shuffled\nlabels",
    "position": "position\nalone",
    "residual": "residual\nstream",
}
SPLITS = {"seen": PALETTE[5], "held out": PALETTE[0]}
SIZES = {"smoke": 160, "laptop": 2048, "paper": 8192}
MAP_SIZES = {"smoke": 100, "laptop": 1500, "paper": 4000}


class CodesExperiment(Experiment):
    """The part that fuzzy logic and SRAVEN have in common."""

    needs_weights = True
    parts: ClassVar[str]
    """What is decoded: rules or terms."""
    colour: ClassVar[str]
    """What the map is coloured by."""
    inputs: ClassVar[str | None] = None
    """How fuzzy logic draws its points while codes are read."""

    def chosen_rows(self, study: Study) -> list[Row]:
        """The runs that are read."""
        return list(study.rows)

    def analyse(self, study: Study, say: Callable[[str], None]) -> None:
        size = SIZES[study.scale]
        found: list[Row] = []
        maps: dict[str, Path] = {}
        for row in self.chosen_rows(study):
            say(f"decoding from the codes of {row['method']}, seed {row['seed']}")
            trained = open_run(row["folder"], inputs=self.inputs)
            start = open_run(row["folder"], UNTRAINED, inputs=self.inputs)
            last = trained.config.model.num_layers - 1
            layers = [last] if study.scale == "smoke" else list(range(last + 1))
            facts = {"method": row["method"], "seed": row["seed"], "last": last}
            found += [{**facts, **result} for result in decode_with_controls(trained, start, layers, size)]
            if row["method"] not in maps:  # of the first seed
                maps[row["method"]] = self._map(trained, study, row["method"])
        study.extra["decoded"], study.extra["maps"] = found, maps
        write_json(study.folder / "decoded.json", found)

    def tables(self, study: Study) -> list[Table]:
        rows: list[Row] = []
        for method in self._methods(study):
            last = study.extra["decoded"][0]["last"]
            for layer in sorted({d["layer"] for d in study.extra["decoded"]}):
                for source in SOURCES:
                    row: Row = {"method": method, "layer": f"{layer} (last)" if layer == last else str(layer)}
                    row["decoded from"] = SOURCES[source].replace("\n", " ")
                    for split in SPLITS:
                        row[f"{split}, macro F1"] = self._mean(study, method, layer, source, split)
                    for split in SPLITS:
                        row[f"{split}, accuracy"] = self._mean(study, method, layer, source, split, "accuracy")
                    rows.append(row)
        return [Table(f"Linear decoding of {self.parts}; mean and 95 % interval over seeds", rows)]

    def verdicts(self, study: Study) -> list[Verdict]:
        last = study.extra["decoded"][0]["last"]
        found = []
        for method in self._methods(study):
            by = {
                (source, split): self._by_seed(study, method, last, source, split)
                for source in SOURCES
                for split in SPLITS
            }
            held_out = by["codes", "held out"]
            for control, words in (("untrained", "an untrained network's"), ("shuffled", "shuffled labels")):
                statement = f"{method}: codes name the {self.parts} of held-out compositions better than {words}."
                found.append(compare(statement, held_out, by[control, "held out"]))
            shares = {seed: held_out[seed] / max(by["codes", "seen"][seed], 1e-9) for seed in held_out}
            found.append(
                Verdict(
                    f"{method}: on held-out compositions codes name the {self.parts} at least 80 % as well as on seen.",
                    judge(Mean.of(shares.values()), 0.8),
                    ", ".join(f"{share:.2f} (seed {seed})" for seed, share in shares.items())
                    + ("; one seed only" if len(shares) == 1 else ""),
                )
            )
        return found

    def draw(self, study: Study, stem: Path) -> list[Path]:
        last, methods = study.extra["decoded"][0]["last"], self._methods(study)
        width = PAGE_WIDTH if len(methods) > 1 else COLUMN_WIDTH
        with canvas(width, 2.6, 1, len(methods), sharey=True, squeeze=False) as (figure, axes):
            for panel, method in zip(axes[0], methods, strict=True):
                groups = {
                    split: [self._mean(study, method, last, source, split) for source in SOURCES] for split in SPLITS
                }
                bars(panel, groups, list(SOURCES.values()), SPLITS)
                self._whiskers(study, panel, method, last)
                panel.tick_params(axis="x", labelsize=5)
                panel.set(title=method, ylim=(0, 1))
            axes[0, 0].set_ylabel(f"macro F1 of the {self.parts}, layer {last}")
            handles, labels = axes[0, 0].get_legend_handles_labels()
            figure.legend(
                handles,
                [f"{label.replace(' ', '-')} compositions" for label in labels],
                loc="outside lower center",
                ncols=2,
            )
            paths = save(figure, stem)
        maps = {method: study.extra["maps"][method] for method in methods}
        return [*paths, *figures.code_map(maps, stem.with_name(f"{stem.name}-map"), self.colour)]

    def _whiskers(self, study: Study, panel: Any, method: str, layer: int) -> None:
        """With a single seed: the bootstrap interval over compositions."""
        for index, split in enumerate(SPLITS):
            for place, source in enumerate(SOURCES):
                mine = self._results(study, method, layer, source, split)
                if len(mine) == 1:
                    low, high = mine[0]["macro_f1_low"], mine[0]["macro_f1_high"]
                    panel.vlines(place + (index - 0.5) * 0.4, low, high, color="0.35", linewidth=0.8, zorder=4)

    def _methods(self, study: Study) -> list[str]:
        return [m for m in MAIN_METHODS if any(d["method"] == m for d in study.extra["decoded"])]

    def _results(self, study: Study, method: str, layer: int, source: str, split: str) -> list[Row]:
        key = (method, layer, source, split)
        return [d for d in study.extra["decoded"] if (d["method"], d["layer"], d["source"], d["split"]) == key]

    def _mean(self, study: Study, method: str, layer: int, source: str, split: str, metric: str = "macro_f1") -> Mean:
        return Mean.of(d[metric] for d in self._results(study, method, layer, source, split))

    def _by_seed(self, study: Study, method: str, layer: int, source: str, split: str) -> dict[int, float]:
        return {d["seed"]: d["macro_f1"] for d in self._results(study, method, layer, source, split)}

    def _map(self, run: OpenRun, study: Study, method: str) -> Path:
        """t-SNE of the held-out compositions' codes, of the last answering token to itself in the last layer."""
        size, last = MAP_SIZES[study.scale], run.config.model.num_layers - 1
        with temporary_folder("map") as folder:
            codes = capture(run, "compositional", folder / "codes.npz", size=size, layers=[last])
            return make_map(codes, study.folder / f"map-{method}.npz", layer=last, size=size)


def decode_with_controls(trained: OpenRun, start: OpenRun, layers: Sequence[int], size: int) -> list[Row]:
    """Macro F1 and accuracy by layer, source and split; decoders are fitted on `size` samples of seen compositions."""
    rows: list[Row] = []
    with temporary_folder("codes") as folder:
        files: dict[tuple[str, str], Arrays] = {}
        for name, run in (("trained", trained), ("untrained", start)):
            stretches = {"fit": ("iid", 0), "seen": ("iid", size), "held out": ("compositional", 0)}
            for use, (split, first) in stretches.items():
                path = folder / f"{name}-{use.replace(' ', '-')}.npz"
                options: dict[str, Any] = {"size": size, "start": first, "layers": layers}
                files[name, use] = capture(run, split, path, **options, residual=name == "trained")
        for layer in layers:
            for source in SOURCES:
                owner = "untrained" if source == "untrained" else "trained"
                kind = source if source in ("residual", "position") else "codes"
                data = {
                    use: examples(trained.task, files[owner, use], layer, kind) for use in ("fit", "seen", "held out")
                }
                if source == "shuffled":
                    order = np.random.default_rng(0).permutation(size)
                    data["fit"] = dataclasses.replace(data["fit"], labels=data["fit"].labels[order])
                decoder = Decoder(data["fit"])
                for split in SPLITS:
                    numbers = dataclasses.asdict(score(data[split], decoder.predict(data[split])))
                    rows.append({"layer": layer, "source": source, "split": split, **numbers})
    return rows
