"""Codes experiments: what a linear decoder reads from the codes, on seen and held-out compositions, with controls.

A decoder is fitted on fresh samples of the training compositions and tested on others of them (`seen`) and on held-out
compositions. The controls are those of `headcode.analysis.decode`: labels shuffled, the untrained network's codes, the
token's position alone, and the same decoder on the residual stream.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headcode.analysis import Decoder, OpenRun, as_authors, capture, examples, likeness, make_map, open_run, score
from headcode.analysis.files import Arrays, open_arrays
from headcode.analysis.runs import UNTRAINED
from headcode.experiments import _codes_figures as codes_figures
from headcode.experiments.base import NO_SEED, Experiment, Row, Study, Table, Verdict, compare, write_json
from headcode.experiments.mean import Mean, judge
from headcode.files import temporary_folder
from headcode.report import figures

SOURCES = {
    "codes": "codes",
    "untrained": "untrained\ncodes",
    "shuffled": "shuffled\nlabels",
    "position": "position\nalone",
    "residual": "residual\nstream",
}
SPLITS = ("seen", "held out")
SIZES = {"smoke": 160, "laptop": 2048, "paper": 8192}
MAP_SIZES = {"smoke": 100, "laptop": 1500, "paper": 4000}


class CodesExperiment(Experiment):
    """The part that fuzzy logic and SRAVEN have in common."""

    needs_weights = True
    parts: ClassVar[str]
    """What is decoded: rules or terms."""
    colour: ClassVar[str]
    """What the map is coloured by."""
    ways: ClassVar[tuple[str, ...]]
    """Whose choice of instances and tokens: `ours`, `authors` (`headcode.analysis.as_authors`). The first one counts
    for the first figure and the maps, the last one for likeness."""
    shared: ClassVar[tuple[str, str] | None] = None
    """Two parts that share a code, as the paper has it."""
    early_colour: ClassVar[str | None] = None
    """What a map of the first layer's codes is coloured by, if there is one."""

    def chosen_rows(self, study: Study) -> list[Row]:
        """The runs that are read."""
        return list(study.rows)

    def analyse(self, study: Study, say: Callable[[str], None]) -> None:
        size, chosen = SIZES[study.scale], self.chosen_rows(study)
        depths = {row["num_layers"] for row in chosen}
        found: list[Row] = []
        alike: list[Row] = []
        files: dict[str, dict[str, Path]] = {"map": {}, "map-early": {}, "likeness": {}}
        for row in chosen:
            say(f"decoding from the codes of {row['method']}, {row['num_layers']} layers, seed {row['seed']}")
            model = row["method"] if len(depths) == 1 else f"{row['method']}, {row['num_layers']} layers"
            trained, start = open_run(row["folder"]), open_run(row["folder"], UNTRAINED)
            last = trained.config.model.num_layers - 1
            layers = [last] if study.scale == "smoke" else list(range(last + 1))
            facts = {"model": model, "method": row["method"], "seed": row["seed"], "last": last}
            for way in self.ways:
                results = decode_with_controls(trained, start, layers, size, way)
                found += [{**facts, "way": way, **result} for result in results]
            path = study.folder / f"likeness-{_slug(model)}-{row['seed']}.npz"
            try:
                alike += [{**facts, **compare_codes(trained, last, size, self.ways[-1], path)}]
                files["likeness"].setdefault(model, path)  # of the first seed
            except ValueError as same:
                say(str(same))
            maps = {"map": (last, self.ways[0])}
            if self.early_colour is not None:
                maps["map-early"] = (0, self.ways[-1])
            for name, (layer, way) in maps.items():
                if model not in files[name]:
                    try:
                        files[name][model] = self._map(trained, study, f"{name}-{_slug(model)}", layer, way)
                    except ValueError as same:
                        say(str(same))
        study.extra |= {"decoded": found, "alike": alike, "files": files}
        write_json(study.folder / "decoded.json", found)

    def tables(self, study: Study) -> list[Table]:
        tables = []
        for way in self.ways:
            rows: list[Row] = []
            for model, last in self._models(study).items():
                for layer in sorted({d["layer"] for d in study.extra["decoded"] if d["model"] == model}):
                    for source in SOURCES:
                        row: Row = {"model": model, "layer": f"{layer} (last)" if layer == last else str(layer)}
                        row["decoded from"] = SOURCES[source].replace("\n", " ")
                        for metric, words in (("macro_f1", "macro F1"), ("accuracy", "accuracy")):
                            for split in SPLITS:
                                key = (model, way, layer, source, split)
                                row[f"{split}, {words}"] = Mean.of(by_seed(study, *key, metric).values())
                        rows.append(row)
            whose = f" ({self._way_words(way)})" if len(self.ways) > 1 else ""
            tables.append(Table(f"Linear decoding of {self.parts}{whose}; mean and 95 % interval over seeds", rows))
        return tables

    def verdicts(self, study: Study) -> list[Verdict]:
        found = []
        for model, last in self._models(study).items():
            for way in self.ways:
                whose = f" ({self._way_words(way)})" if way != self.ways[0] else ""
                held_out = by_seed(study, model, way, last, "codes", "held out")
                seen = by_seed(study, model, way, last, "codes", "seen")
                for control, words in (("untrained", "an untrained network's"), ("shuffled", "shuffled labels")):
                    statement = (
                        f"{model}: codes name the {self.parts} of held-out compositions better than {words}{whose}."
                    )
                    found.append(compare(statement, held_out, by_seed(study, model, way, last, control, "held out")))
                shares = {seed: held_out[seed] / max(seen[seed], 1e-9) for seed in held_out}
                statement = (
                    f"{model}: on held-out compositions codes name the {self.parts} at least 80 % as well as on seen"
                )
                evidence = ", ".join(f"{share:.2f} (seed {seed})" for seed, share in shares.items()) or NO_SEED
                evidence += "; one seed only" if len(shares) == 1 else ""
                found.append(Verdict(f"{statement}{whose}.", judge(Mean.of(shares.values()), 0.8), evidence))
                if first := by_seed(study, model, way, 0, "codes", "held out") if last else {}:
                    statement = f"{model}: codes of the last layer name the {self.parts} better than those of the first"
                    found.append(compare(f"{statement}{whose}.", held_out, first))
            if self.shared is not None:
                found.append(self._verdict_on_shared_codes(study, model, self.shared))
        return found

    def _verdict_on_shared_codes(self, study: Study, model: str, shared: tuple[str, str]) -> Verdict:
        """Whether the mean codes of two parts are more alike than those of the first and the others."""
        pair: dict[int, float] = {}
        others: dict[int, float] = {}
        for row in study.extra["alike"]:
            if row["model"] == model and set(shared) <= set(row["names"]):
                first, second = (row["names"].index(name) for name in shared)
                rest = [v for i, v in enumerate(row["centred"][first]) if i not in (first, second) and np.isfinite(v)]
                if rest and np.isfinite(row["centred"][first][second]):
                    pair[row["seed"]], others[row["seed"]] = row["centred"][first][second], float(np.mean(rest))
        statement = (
            f"{model}: the mean codes of {shared[0]} (seen) and {shared[1]} (held out) are more alike than those of"
        )
        return compare(f"{statement} {shared[0]} and the other {self.parts}.", pair, others)

    def draw(self, study: Study, stem: Path) -> list[Path]:
        files = study.extra["files"]
        paths = codes_figures.controls(study, self.ways[0], self._models(study), SOURCES, self.parts, stem)
        paths += codes_figures.layers(study, self._way_names(), self._models(study), self.parts, beside(stem, "layers"))
        for name, colour in (("map", self.colour), ("map-early", self.early_colour)):
            if files[name] and colour is not None:
                paths += figures.code_map(files[name], beside(stem, name), colour)
        if files["likeness"]:
            paths += figures.rule_likeness(files["likeness"], beside(stem, "likeness"))
        return paths

    def _models(self, study: Study) -> dict[str, int]:
        """By model: its last layer."""
        return {row["model"]: row["last"] for row in study.extra["decoded"]}

    def _way_names(self) -> dict[str, str]:
        return {way: self._way_words(way) if len(self.ways) > 1 else "codes" for way in self.ways}

    def _way_words(self, way: str) -> str:
        return {"ours": "our way of taking codes", "authors": "the authors' way of taking codes"}[way]

    def _map(self, run: OpenRun, study: Study, name: str, layer: int, way: str) -> Path:
        """t-SNE of the held-out compositions' codes of the last answering token in one layer."""
        size = MAP_SIZES[study.scale]
        run, pairs = taken(run, way)
        with temporary_folder("map") as folder:
            codes = capture(run, "compositional", folder / "codes.npz", size=size, layers=[layer], **pairs)
            return make_map(codes, study.folder / f"{name}.npz", layer=layer, size=size)


def beside(stem: Path, ending: str) -> Path:
    """The path of a further figure."""
    return stem.with_name(f"{stem.name}-{ending}")


def _slug(model: str) -> str:
    return model.replace(", ", "-").replace(" ", "-")


def by_seed(
    study: Study, model: str, way: str, layer: int, source: str, split: str, metric: str = "macro_f1"
) -> dict[int, float]:
    """A number of the decoders' scores, by seed."""
    return {row["seed"]: row[metric] for row in codes_figures.decoded(study, model, way, layer, source, split)}


def taken(run: OpenRun, way: str) -> tuple[OpenRun, Mapping[str, Any]]:
    """The run on the instances, and the queries and keys, of a way of taking codes."""
    return as_authors(run) if way == "authors" else (run, {})


def compare_codes(run: OpenRun, layer: int, size: int, way: str, path: Path) -> Row:
    """Cosine similarity of mean codes, seen against held-out compositions, into a file; and the numbers themselves."""
    run, pairs = taken(run, way)
    with temporary_folder("likeness") as folder:
        seen, held_out = (
            capture(run, split, folder / f"{split}.npz", size=size, layers=[layer], **pairs)
            for split in ("iid", "compositional")
        )
        likeness(seen, held_out, path, layer=layer)
    arrays = open_arrays(path)
    names = [run.task.label_name(int(label)) for label in arrays["classes"]]
    return {"names": names, "centred": np.asarray(arrays["centred"]).tolist()}


def decode_with_controls(
    trained: OpenRun, start: OpenRun, layers: Sequence[int], size: int, way: str = "ours"
) -> list[Row]:
    """Macro F1 and accuracy by layer, source and split; decoders are fitted on `size` samples of seen compositions."""
    rows: list[Row] = []
    with temporary_folder("codes") as folder:
        files: dict[tuple[str, str], Arrays] = {}
        for name, opened in (("trained", trained), ("untrained", start)):
            run, pairs = taken(opened, way)
            stretches = {"fit": ("iid", 0), "seen": ("iid", size), "held out": ("compositional", 0)}
            for use, (split, first) in stretches.items():
                path = folder / f"{name}-{use.replace(' ', '-')}.npz"
                options: dict[str, Any] = {"size": size, "start": first, "layers": layers, **pairs}
                files[name, use] = capture(run, split, path, **options, residual=name == "trained")
        for layer in layers:
            for source in SOURCES:
                owner = "untrained" if source == "untrained" else "trained"
                kind = source if source in ("residual", "position") else "codes"
                data = {use: examples(run.task, files[owner, use], layer, kind) for use in ("fit", "seen", "held out")}
                if source == "shuffled":
                    order = np.random.default_rng(0).permutation(size)
                    data["fit"] = dataclasses.replace(data["fit"], labels=data["fit"].labels[order])
                decoder = Decoder(data["fit"])
                for split in SPLITS:
                    numbers = dataclasses.asdict(score(data[split], decoder.predict(data[split])))
                    rows.append({"layer": layer, "source": source, "split": split, **numbers})
    return rows
