"""One function per figure. Each reads result files, draws, and writes STEM.svg and STEM.png."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headcode.analysis.decode import read_result
from headcode.analysis.files import Arrays, open_arrays
from headcode.files import is_count, is_number, is_word
from headcode.report.style import (
    COLUMN_WIDTH,
    GREY,
    MARKERS,
    METHOD_COLOURS,
    PAGE_WIDTH,
    PALETTE,
    canvas,
    legend_below,
    save,
)
from headcode.tasks import TASKS, Task

# The columns that a result needs to be drawn; its file may come from elsewhere.
_SCORE = {name: is_number for name in ("macro_f1", "macro_f1_low", "macro_f1_high")}
DECODING = {"layer": is_count, "source": is_word, "split": is_word, "subset": is_word, **_SCORE}
_PATCHING: dict[str, Callable[[Any], bool]] = {
    "donor": is_word,
    "control": is_word,
    "layer": lambda value: is_count(value) or is_word(value),
    "pairs": is_count,
    **{name: is_number for name in ("follows", "follows_low", "follows_high")},
}
_ABLATION: dict[str, Callable[[Any], bool]] = {
    "layer": lambda value: value is None or is_count(value),
    "head": lambda value: value is None or is_count(value, MOST_HEADS),
}
MOST_HEADS = 2**16

SOURCES = {
    "codes": ("codes", PALETTE[1]),
    "residual": ("residual stream", PALETTE[0]),
    "untrained": ("untrained codes", PALETTE[5]),
    "shuffled": ("shuffled labels", PALETTE[3]),
    "position": ("position alone", GREY),
}


def decoding(results: Mapping[str, str | Path], stem: str | Path) -> list[Path]:
    """Macro F1 on held-out compositions by layer, codes beside their controls; one panel per named result."""
    found = {name: _whole_set(read_result(path, DECODING)["rows"], path) for name, path in results.items()}
    width = COLUMN_WIDTH if len(found) == 1 else PAGE_WIDTH
    with canvas(width, 2.3, 1, len(found), sharey=True, squeeze=False) as (figure, axes):
        for panel, (name, rows) in zip(axes[0], found.items(), strict=True):
            layers = sorted({row["layer"] for row in rows})
            sources = [source for source in SOURCES if any(row["source"] == source for row in rows)]
            bar = 0.8 / len(sources)
            for index, source in enumerate(sources):
                label, colour = SOURCES[source]
                mine = {row["layer"]: row for row in rows if row["source"] == source}
                x = [layers.index(layer) + (index - (len(sources) - 1) / 2) * bar for layer in mine]
                height = np.array([row["macro_f1"] for row in mine.values()])
                low = np.array([row["macro_f1_low"] for row in mine.values()])
                high = np.array([row["macro_f1_high"] for row in mine.values()])
                error = np.maximum([height - low, high - height], 0)
                panel.bar(x, height, bar * 0.9, color=colour, label=label)
                panel.errorbar(x, height, error, fmt="none", ecolor="#333333", elinewidth=0.7, capsize=1.2)
            panel.set(title=name, xlabel="layer", xticks=range(len(layers)), xticklabels=layers, ylim=(0, 1))
        axes[0, 0].set_ylabel("macro F1, held out")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        legend_below(figure, handles, labels)
        return save(figure, stem)


def _whole_set(rows: Sequence[dict[str, Any]], path: str | Path) -> list[dict[str, Any]]:
    """The rows about all instances, of the sources that have a colour."""
    chosen = [row for row in rows if row["subset"] == "all" and row["source"] in SOURCES]
    if not chosen:
        raise ValueError(f"{path} has no rows of {', '.join(SOURCES)} on all instances.")
    return chosen


def solved_against_failed(results: Mapping[str, str | Path], stem: str | Path, layer: int = -1) -> list[Path]:
    """Macro F1 of the codes on solved and on failed instances, one pair of bars per named result."""
    found = {name: read_result(path, DECODING) for name, path in results.items()}
    with canvas(COLUMN_WIDTH, 2.2) as (figure, axes):
        for shift, subset, colour in ((-0.18, "solved", PALETTE[2]), (0.18, "failed", PALETTE[3])):
            label: str | None = subset
            for place, result in enumerate(found.values()):
                rows = [r for r in result["rows"] if r["source"] == "codes" and r["subset"] == subset]
                layers = sorted({row["layer"] for row in rows})
                for row in (row for row in rows if row["layer"] == layers[layer]):
                    error = [[row["macro_f1"] - row["macro_f1_low"]], [row["macro_f1_high"] - row["macro_f1"]]]
                    axes.bar(place + shift, row["macro_f1"], 0.33, color=colour, label=label)
                    label = None
                    axes.errorbar(
                        place + shift, row["macro_f1"], np.maximum(error, 0), fmt="none", ecolor="#333333", lw=0.7
                    )
        axes.set(xticks=range(len(found)), xticklabels=list(found), ylabel="macro F1, held out", ylim=(0, 1))
        figure.legend(loc="outside upper center", ncols=2)
        return save(figure, stem)


def code_map(maps: Mapping[str, str | Path], stem: str | Path, colour: str = "rule") -> list[Path]:
    """Maps of codes (t-SNE, PCA or UMAP) coloured by rule, term, target or correct; one panel per named map.

    Points are moved by about a hundredth of the map, so that codes that coincide show all their colours.
    """
    found = {name: open_arrays(path) for name, path in maps.items()}
    width = COLUMN_WIDTH if len(found) == 1 else PAGE_WIDTH
    for name, arrays in found.items():
        if colour not in arrays:
            known = ", ".join(sorted(set(arrays) - {"points"}))
            raise ValueError(f"The map of {name} can be coloured by {known}, not by {colour!r}.")
        shape = arrays["points"].shape if "points" in arrays else ()
        if (
            shape[1:] != (2,)
            or arrays[colour].shape != shape[:1]
            or not all(
                array.dtype.kind in "biuf" and np.isfinite(array).all() for array in (arrays["points"], arrays[colour])
            )
        ):
            raise ValueError(f"The map of {name} must have points (N, 2) and a {colour} for each, all numbers.")
    # One legend for all panels, though a class may be missing in some.
    names = _class_names(
        _task_of(next(iter(found.values()))),
        colour,
        np.concatenate([np.asarray(arrays[colour]) for arrays in found.values()]),
    )
    with canvas(width, 2.7 if len(found) == 1 else 2.6, 1, len(found), squeeze=False) as (figure, axes):
        for panel, (name, arrays) in zip(axes[0], found.items(), strict=True):
            points, labels = np.asarray(arrays["points"]), np.asarray(arrays[colour])
            points = points + 0.012 * np.ptp(points, axis=0) * np.random.default_rng(0).normal(size=points.shape)
            if names is None:
                drawn = panel.scatter(*points.T, c=labels, cmap="cividis", s=3, lw=0, rasterized=True)
                figure.colorbar(drawn, ax=panel, label=colour, shrink=0.8)
            else:
                for index, (value, label) in enumerate(names.items()):
                    chosen = labels == value
                    tone, marker = PALETTE[index % 8], MARKERS[index % 8]
                    style = {"color": tone, "s": 5, "lw": 0, "alpha": 0.8}
                    if index >= len(PALETTE):  # the second round of colours is hollow
                        style = {"facecolors": "none", "edgecolors": tone, "s": 6, "lw": 0.6}
                    panel.scatter(*points[chosen].T, label=label, marker=marker, rasterized=True, **style)
            panel.set(title=name, xticks=[], yticks=[])
            for side in ("left", "bottom"):
                panel.spines[side].set_visible(False)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        if handles:
            place = "outside right center" if len(found) == 1 else "outside lower center"
            columns = 1 if len(found) == 1 else min(len(handles), 12)
            space = {"markerscale": 2, "handletextpad": 0.1, "columnspacing": 1}
            figure.legend(handles, labels, loc=place, ncols=columns, title=colour, title_fontsize=8, **space)
        return save(figure, stem)


def rule_likeness(files: Mapping[str, str | Path], stem: str | Path, kind: str = "centred") -> list[Path]:
    """Cosine similarity of mean codes: training compositions (rows) against held-out ones (columns)."""
    found = {name: open_arrays(path) for name, path in files.items()}
    width = COLUMN_WIDTH if len(found) == 1 else PAGE_WIDTH
    with canvas(width, 2.9 if len(found) == 1 else 2.8, 1, len(found), squeeze=False) as (figure, axes):
        for panel, (name, arrays) in zip(axes[0], found.items(), strict=True):
            values, classes = np.asarray(arrays[kind]), np.asarray(arrays["classes"])
            names = [_task_of(arrays).label_name(int(label)) for label in classes]
            drawn = panel.imshow(values, cmap="PuOr_r", vmin=-1, vmax=1)
            panel.set_facecolor("#DDDDDD")
            panel.set(title=name, xticks=range(len(names)), yticks=range(len(names)), xlabel="held out")
            panel.set_xticklabels(names, rotation=90)
            panel.set_yticklabels(names if panel is axes[0, 0] else [])
        axes[0, 0].set_ylabel("training compositions")
        figure.colorbar(drawn, ax=axes[0], label="cosine similarity", shrink=0.8)
        return save(figure, stem)


def along_training(files: Mapping[str, str | Path], stem: str | Path) -> list[Path]:
    """Decodability and solved share along training; the path of each rule's mean code (of the first file)."""
    found = {name: open_arrays(path) for name, path in files.items()}
    with canvas(PAGE_WIDTH, 2.8, 1, 2) as (figure, (left, right)):
        for index, (name, arrays) in enumerate(found.items()):
            rows = arrays.card["rows"]
            steps = [row["step"] for row in rows]
            colour = METHOD_COLOURS.get(arrays.card["method"], PALETTE[index])
            left.plot(steps, [row["macro_f1"] for row in rows], marker="o", color=colour, label=f"{name}, F1")
            left.plot(steps, [row["solved"] for row in rows], ls="--", color=colour, label=f"{name}, solved")
        left.set(xlabel="training step", ylabel="held-out compositions", ylim=(0, 1))
        left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=len(found))
        first = next(iter(found.values()))
        means, classes = np.asarray(first["means"]), np.asarray(first["classes"])
        for index, value in enumerate(classes):
            label = _task_of(first).label_name(int(value))
            style = {"color": PALETTE[index % 8]}
            right.plot(*means[:, index].T, lw=0.8, alpha=0.6, **style)
            right.plot(*means[-1, index], marker=MARKERS[index % 8], ls="", ms=6, label=label, **style)
        right.plot(*means[0].T, marker=".", color=GREY, ls="", ms=5, label="untrained")
        right.set(xticks=[], yticks=[], title=f"mean codes from start to end, {next(iter(found))}")
        for side in ("left", "bottom"):
            right.spines[side].set_visible(False)
        right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        return save(figure, stem)


def patching(results: Mapping[str, str | Path], stem: str | Path, donor: str | None = None) -> list[Path]:
    """Share of answers that follow the donor's code, by layer, patched and with its controls; one panel per result."""
    found = {name: read_result(path, _PATCHING)["rows"] for name, path in results.items()}
    kind = donor or next(iter(found.values()))[0]["donor"]
    for name, everything in found.items():
        if kind not in (known := list(dict.fromkeys(row["donor"] for row in everything))):
            raise ValueError(f"The result of {name} has the donors {', '.join(known)}, not {kind!r}.")
    width = COLUMN_WIDTH if len(found) == 1 else PAGE_WIDTH
    with canvas(width, 2.3, 1, len(found), sharey=True, squeeze=False) as (figure, axes):
        for panel, (name, everything) in zip(axes[0], found.items(), strict=True):
            rows = [row for row in everything if row["donor"] == kind]
            by_place = {(row["control"], row["layer"]): row for row in rows}
            places = [place for control, place in by_place if control == "patched"]
            none = next((row["follows"] for row in rows if row["control"] == "none"), None)
            if none is None or not all(("shuffled", place) in by_place for place in places):
                raise ValueError(f"The result of {name} lacks the controls none and shuffled for the donor {kind!r}.")
            bars = (("patched", "patched code", PALETTE[1]), ("shuffled", "heads shuffled", PALETTE[0]))
            for shift, (control, label, colour) in zip((-0.2, 0.2), bars, strict=True):
                for x, place in enumerate(places):
                    row = by_place[control, place]
                    error = [[row["follows"] - row["follows_low"]], [row["follows_high"] - row["follows"]]]
                    panel.bar(x + shift, row["follows"], 0.36, color=colour, label=label if x == 0 else None)
                    panel.errorbar(
                        x + shift, row["follows"], np.maximum(error, 0), fmt="none", ecolor="#333333", lw=0.7
                    )
            panel.axhline(none, color=GREY, ls=":", label="no patch")
            panel.set(title=f"{name}, {rows[0]['pairs']} pairs", xlabel="patched layer", ylim=(0, 1))
            panel.set_xticks(range(len(places)))
            panel.set_xticklabels([str(place) for place in places])
        axes[0, 0].set_ylabel(f"answers that follow\n(donor: {kind.replace('_', ' ')})")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        legend_below(figure, handles, labels)
        return save(figure, stem)


def head_ablation(results: Mapping[str, str | Path], stem: str | Path) -> list[Path]:
    """What is lost when single heads are taken out: a layer × head table per named result, on one scale."""
    found = {name: read_result(path, _ABLATION) for name, path in results.items()}
    width = COLUMN_WIDTH if len(found) == 1 else PAGE_WIDTH
    metric = "accuracy" if all("accuracy" in result["rows"][0] for result in found.values()) else "r2"
    for name, result in found.items():
        rows = result["rows"]
        heads = [row for row in rows if None not in (row["head"], row["layer"])]
        if not heads or not all(is_number(row.get(metric)) for row in rows):
            raise ValueError(f"The result of {name} must have {metric} for the whole model and without each head.")
    tables = {name: _losses(result["rows"], metric) for name, result in found.items()}
    most = max(float(np.nanmax(losses)) for _, losses in tables.values())
    with canvas(width, 1.9, 1, len(found), squeeze=False) as (figure, axes):
        for panel, (name, (layers, losses)) in zip(axes[0], tables.items(), strict=True):
            drawn = panel.imshow(losses, cmap="viridis", vmin=0, vmax=max(most, 1e-6), aspect="auto")
            panel.set(title=name, xlabel="head", yticks=range(len(layers)), yticklabels=layers)
            panel.xaxis.get_major_locator().set_params(integer=True)
        axes[0, 0].set_ylabel("layer")
        figure.colorbar(drawn, ax=axes[0], label=f"{metric} lost".replace("r2", "R²"), shrink=0.9)
        return save(figure, stem)


def _losses(rows: Sequence[dict[str, Any]], metric: str) -> tuple[list[int], np.ndarray]:
    """Layers, and (layer, head) what a metric loses; the first row is the whole model."""
    single = [row for row in rows if row["head"] is not None and row["layer"] is not None]
    layers = sorted({row["layer"] for row in single})
    losses = np.full((len(layers), 1 + max(row["head"] for row in single)), np.nan)
    for row in single:
        losses[layers.index(row["layer"]), row["head"]] = rows[0][metric] - row[metric]
    return layers, losses


def heads_at_fixed_width(path: str | Path, stem: str | Path) -> list[Path]:
    """Generalisation against the number of heads, all widths fixed: a line per method, held out and iid."""
    rows = read_result(path)["rows"]
    with canvas(COLUMN_WIDTH, 2.8) as (figure, axes):
        for index, method in enumerate(sorted({row["method"] for row in rows})):
            colour = METHOD_COLOURS.get(method, PALETTE[index])
            for split, line in (("compositional", "-"), ("iid", ":")):
                mine = [row for row in rows if row["method"] == method and row.get(split) is not None]
                heads = sorted({row["num_heads"] for row in mine})
                mean = [np.mean([row[split] for row in mine if row["num_heads"] == h]) for h in heads]
                axes.plot(heads, mean, line, marker="o", color=colour, label=f"{method}, {split}")
        ticks = sorted({row["num_heads"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set(xlabel="heads (all widths fixed)", ylabel=rows[0]["metric"].replace("r2", "R²"))
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.minorticks_off()
        legend_below(figure)
        return save(figure, stem)


def lens_layers(path: str | Path, stem: str | Path) -> list[Path]:
    """A pretrained model by layer: norm and effective rank of W[q,k], and how far codes go with token kinds."""
    result = read_result(path)
    rows: Sequence[dict[str, Any]] = result["rows"]
    layers = [row["layer"] for row in rows]
    with canvas(PAGE_WIDTH, 2.2, 1, 3) as (figure, (norm, rank, kinds)):
        norm.plot(layers, [row["norm_mean"] for row in rows], marker="o", color=PALETTE[0])
        norm.set(xlabel="layer", ylabel="mean norm of W[q,k]", ylim=(0, None))
        mean = np.array([row["rank_mean"] for row in rows])
        rank.plot(layers, mean, marker="o", color=PALETTE[1])
        low, high = [row["rank_min"] for row in rows], [row["rank_max"] for row in rows]
        rank.fill_between(layers, low, high, color=PALETTE[1], alpha=0.2, lw=0)
        rank.set(xlabel="layer", ylabel="effective rank of W[q,k]", ylim=(0, None))
        for name, label, colour in (("share", "token kinds", PALETTE[2]), ("control", "shuffled kinds", GREY)):
            kinds.plot(layers, [row["explained"][name] for row in rows], marker="o", color=colour, label=label)
        kinds.set(xlabel="layer", ylabel="variance of codes explained", ylim=(0, None))
        kinds.legend()
        return save(figure, stem)


def lens_patching(rows: Sequence[Mapping[str, Any]], stem: str | Path) -> list[Path]:
    """How far a pretrained model's output moves when one layer works with another sentence's codes, by donor."""
    with canvas(PAGE_WIDTH, 2.4) as (figure, axes):
        for index, donor in enumerate(dict.fromkeys(row["donor"] for row in rows)):
            mine = [row for row in rows if row["donor"] == donor]
            layers = [row["layer"] for row in mine]
            moved = np.array([row["moved"]["value"] for row in mine])
            error = np.array([row["moved"]["high"] for row in mine]) - moved
            # On a scale of powers of ten, an interval that reaches 0 would have no end.
            down = np.minimum(error, 0.9 * moved)
            axes.errorbar(
                layers, moved, [down, error], label=donor, color=PALETTE[index], marker=MARKERS[index], capsize=2
            )
        axes.set(xlabel="patched layer", ylabel="output moved", xticks=layers, yscale="log")
        legend_below(figure)
        return save(figure, stem)


def _task_of(arrays: Arrays) -> type[Task]:
    """The task of a file's card, for the names of its classes; files may come from elsewhere."""
    return TASKS.get(str(arrays.card.get("task")), Task)


def _class_names(task: type[Task], colour: str, labels: np.ndarray) -> dict[int, str] | None:
    """The names of classes that fit into a legend, or None for numbers on a scale."""
    if colour == "correct":
        return {0: "failed", 1: "solved"}
    if not np.issubdtype(labels.dtype, np.integer):
        return None
    values = [int(v) for v in np.unique(labels)]
    if len(values) > 16:
        return None
    return {v: task.label_name(v) if colour == task.label_kind else str(v) for v in values}
