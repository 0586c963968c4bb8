"""A page about one run or several: curves, scores with the best possible, decoding, maps, ablations, settings.

It shows what lies in the run folders: `metrics.jsonl`, `config.json`, `environment.json`, a zoo model's `card.json`,
in `analysis/` what `headcode decode` (with --ablate, --patch) wrote, and the maps of `headcode codes --map`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headcode.analysis.decode import read_result
from headcode.analysis.files import open_arrays
from headcode.files import is_number, read_text
from headcode.report import figures
from headcode.report.curves import METRIC_TITLES, scores_by_split, training_curves
from headcode.report.page import Block, Figure, Heading, Page, Preformatted, Table, Text
from headcode.run import RunConfig, fields_of, get_field
from headcode.train.checkpoint import find_run
from headcode.train.folder import read_environments, read_metrics, read_run_config

ANALYSIS = "analysis"
CEILING_PUZZLES = 4096
MAPS = ("tsne", "umap", "pca")
"""Kinds of maps; of several, the first of these is shown."""


def report_runs(runs: Sequence[str | Path], out: Path, pictures: Path) -> Path:
    """Write the page about these runs; `pictures` is a folder for its figures while they are made."""
    folders = [find_run(run) for run in runs]
    configs = [read_run_config(folder) for folder in folders]
    tasks = {config.task.name for config in configs}
    if len(tasks) > 1:
        raise ValueError(f"A report compares runs of one task, got {', '.join(sorted(tasks))}; make one for each.")
    names = _names(folders, configs)
    found = dict(zip(names, folders, strict=True))
    by_name = dict(zip(names, configs, strict=True))
    # Commands write beside the path that they were given; for a model of the zoo that is not where its weights lie.
    pairs = zip(names, runs, folders, strict=True)
    places = {name: tuple(dict.fromkeys((Path(run), folder))) for name, run, folder in pairs}
    title = folders[0].resolve().name if len(names) == 1 else f"{len(names)} runs on {tasks.copy().pop()}"
    lead = f"Trained with headcode on {tasks.copy().pop()}: " + ", ".join(
        f"{config.model.method} ({config.steps:,} steps, seed {config.seed})" for config in configs
    )
    page = Page(title, lead + ".")
    page.section("Scores", *_scores(found, by_name, pictures))
    page.section("Along training", *_curves(found, by_name, pictures))
    for section, blocks in (
        ("Codes", _codes(places, pictures, configs[0].task.label_kind)),
        ("Interventions", _interventions(places, pictures)),
    ):
        page.section(section, *(blocks or [_how_to_get(section, runs[0])]))
    page.section("Settings", *_settings(found, by_name))
    return page.write(out)


def _names(folders: Sequence[Path], configs: Sequence[RunConfig]) -> list[str]:
    """A run's method where that tells the runs apart, otherwise its folder's name; repeated ones get a number."""
    methods = [config.model.method for config in configs]
    wanted = methods if len(set(methods)) == len(methods) else [folder.resolve().name for folder in folders]
    return [
        name if wanted.count(name) == 1 else f"{name} ({wanted[:i].count(name) + 1})" for i, name in enumerate(wanted)
    ]


def _scores(found: Mapping[str, Path], configs: Mapping[str, RunConfig], pictures: Path) -> list[Block]:
    rows: list[dict[str, Any]] = []
    main: dict[str, dict[str, float | None]] = {}
    for name, folder in found.items():
        records = [record for record in read_metrics(folder) if record["kind"] == "eval"]
        last = max((record["step"] for record in records), default=None)
        for record in records:
            if record["step"] == last:
                rest = {k: v for k, v in record.items() if k not in ("kind", "step", "split")}
                rows.append({"run": name, "split": record["split"], "step": last, **rest})
                main.setdefault(name, {})[record["split"]] = rest.get(configs[name].task.main_metric)
    if not rows:
        return [Text("These runs have not been evaluated yet.")]
    first = next(iter(configs.values()))
    metric = first.task.main_metric
    ceilings = best_possible(first)
    blocks: list[Block] = []
    if metric in ("r2", "accuracy"):
        drawn = scores_by_split(main, pictures / "scores", metric, ceilings)
        words = f"{_capital(METRIC_TITLES[metric])} by split, at the last evaluation."
        blocks.append(
            Figure(drawn[0], words + (" Dashed: the best possible, by the exact solver." if ceilings else ""))
        )
    blocks.append(Table(rows))
    if ceilings:
        share = ", ".join(f"{split} {value:.4f}" for split, value in ceilings.items())
        blocks.append(Text(f"The best possible, over {CEILING_PUZZLES:,} puzzles of each split: {share}."))
    return blocks


def best_possible(config: RunConfig) -> dict[str, float]:
    """The exact solver's accuracy by split; nothing where there is no exact solver for the task."""
    splits = [split for split in config.task.splits if split != "train"]
    found = {split: config.task.ceiling(split, CEILING_PUZZLES) for split in splits}
    return {split: value for split, value in found.items() if value is not None}


def _curves(found: Mapping[str, Path], configs: Mapping[str, RunConfig], pictures: Path) -> list[Block]:
    config = next(iter(configs.values()))
    metric = config.task.main_metric
    if not any(record["kind"] == "eval" for folder in found.values() for record in read_metrics(folder)):
        return [Text("No evaluations along training.")]
    drawn = training_curves(found, pictures / "curves", metric, best_possible(config))
    return [Figure(drawn[0], f"{_capital(METRIC_TITLES.get(metric, metric))} along training, split by split.")]


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _results(places: Mapping[str, Sequence[Path]], file: str) -> dict[str, Path]:
    """By run, what `headcode decode` wrote under this name, where it did."""
    found = {
        name: [p for place in folders if (p := place / ANALYSIS / file).is_file()] for name, folders in places.items()
    }
    return {name: paths[0] for name, paths in found.items() if paths}


def _last_map(folders: Sequence[Path]) -> Path | None:
    """The map of the last layer that `headcode codes --map` drew."""
    for kind in MAPS:
        for folder in folders:
            drawn = {
                int(layer[1]): p for p in folder.glob("*.npz") if (layer := re.search(rf"-{kind}-layer(\d+)$", p.stem))
            }
            if drawn:
                return drawn[max(drawn)]
    return None


def _codes(places: Mapping[str, Sequence[Path]], pictures: Path, label_kind: str) -> list[Block]:
    blocks: list[Block] = []
    decoded = _results(places, "decode.json")
    if decoded:
        drawn = figures.decoding(decoded, pictures / "decode")
        rows = [
            {"run": name, **{k: row[k] for k in ("layer", "source", "split", "macro_f1", "accuracy")}}
            for name, path in decoded.items()
            for row in read_result(path, {**figures.DECODING, "accuracy": is_number})["rows"]
            if row["subset"] == "all"
        ]
        blocks += [
            Heading("Decoding rules and terms from codes"),
            Figure(drawn[0], "Macro F1 on held-out compositions by layer, codes beside their controls."),
            Table(rows),
        ]
    maps = {name: path for name, folders in places.items() if (path := _last_map(folders)) is not None}
    shared = [set(open_arrays(path)) for path in maps.values()]
    colour = next((c for c in (label_kind, "target", "correct") if maps and all(c in each for each in shared)), None)
    if colour is not None:
        drawn = figures.code_map(maps, pictures / "map", colour)
        words = f"Codes of the last layer in two dimensions, a dot per instance, coloured by {colour}."
        blocks += [Heading("Map of the codes"), Figure(drawn[1], words)]
    return blocks


def _interventions(places: Mapping[str, Sequence[Path]], pictures: Path) -> list[Block]:
    blocks: list[Block] = []
    kinds = (
        ("patch", "Patched codes", figures.patching, "How often the answer follows a code from another instance."),
        ("ablate", "Heads taken out", figures.head_ablation, "What taking out one head costs."),
    )
    for file, title, draw, caption in kinds:
        if results := _results(places, f"{file}.json"):
            drawn = draw(results, pictures / file)
            blocks += [Heading(title), Figure(drawn[0], caption)]
    return blocks


def _how_to_get(section: str, run: str | Path) -> Block:
    commands = [f"headcode decode {run}", f"headcode codes {run} --size 4096 --map tsne"]
    if section != "Codes":
        commands = [f"headcode decode {run} --patch --ablate"]
    return Text(f"Nothing here yet: run {' and '.join(commands)}, then make this report again.")


def _settings(found: Mapping[str, Path], configs: Mapping[str, RunConfig]) -> list[Block]:
    rows = []
    for field in fields_of(next(iter(configs.values()))):
        values = {name: get_field(config, field) for name, config in configs.items()}
        if len(configs) == 1 or len({json.dumps(value) for value in values.values()}) > 1:
            rows.append({"field": field, **{name: json.dumps(value) for name, value in values.items()}})
    blocks: list[Block] = []
    if len(configs) > 1:
        blocks += [Text("Where the runs differ:"), Table(rows)]
    for name, folder in found.items():
        blocks.append(Preformatted(configs[name].to_json(), f"Configuration of {name}"))
        if environments := read_environments(folder):
            blocks.append(Preformatted(json.dumps(environments, indent=2), f"Environment of {name}"))
        card = folder / "card.json"
        if card.is_file():
            blocks.append(Preformatted(read_text(card), f"Card of {name}"))
    return blocks
