"""Capacity control: is a better held-out score composition, or only a better fit?

Three controls. Matched parameters: all eight methods have equally many. Matched FLOPs: HYLA's second layer costs
arithmetic in the attention, so softmax and linear get a wider feed-forward network until they cost as much. Matched
training loss: along training, each method's held-out score is read off where its training loss passes a given value.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator

from headcode.experiments._drawing import colour_of, limits, line
from headcode.experiments._logic import ABLATED_METHODS, MAIN_METHODS, at_one_rate, seeds_of
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict, compare, write_json
from headcode.experiments.mean import Mean, per_seed
from headcode.nn import Transformer
from headcode.report.style import PAGE_WIDTH, canvas, save
from headcode.run import RunConfig, override
from headcode.sweep import grid
from headcode.train.cost import step_flops
from headcode.train.folder import read_metrics, read_run_config

WIDENED = ("softmax", "linear", "linear_rms")
LEVELS = 5
"""Training losses at which the methods are compared."""


class Capacity(Experiment):
    name = "capacity"
    title = "Capacity control: held-out score at matched parameters, FLOPs and training loss"
    question = "Does HYLA compose better, or does it merely fit better?"
    claim = "Not in the paper; its reviewers asked."
    selection = (
        "Learning rate 3e-3, decay 0.1 for all methods, last checkpoint; for matched training loss, every evaluation "
        "along training, and no choice at all."
    )

    def runs(self, scale: Scale) -> NamedConfigs:
        base = at_one_rate(scale)
        yield from grid(base, seed=seeds_of(scale), method=ABLATED_METHODS)
        for method in WIDENED:
            wide = widened_to(override(base, method=method), step_flops(override(base, method="hyla")))
            for name, config in grid(wide, seed=seeds_of(scale)):
                yield f"method={method},mlp_dim={wide.model.mlp_dim},{name}", config

    def analyse(self, study: Study, say: Callable[[str], None]) -> None:
        """Training loss and scores of every evaluation of every run."""
        narrow = min(row["mlp_dim"] for row in study.rows)
        curves = []
        for row in study.rows:
            config = read_run_config(Path(row["folder"]))
            curves += [
                {"method": row["method"], "seed": row["seed"], "wide": row["mlp_dim"] > narrow, **point}
                for point in loss_and_scores(Path(row["folder"]))
            ]
            row["parameters"] = sum(p.numel() for p in Transformer(config.model).parameters())
            row["step_flops"] = step_flops(config)
            row["wide"] = row["mlp_dim"] > narrow
        study.extra["curves"] = curves
        write_json(study.folder / "curves.json", curves)

    def tables(self, study: Study) -> list[Table]:
        rows: list[Row] = []
        for wide in (False, True):
            for method in ABLATED_METHODS:
                mine = study.where(method=method, wide=wide)
                if mine:
                    rows.append(
                        {
                            "method": method + (" (as many FLOPs as hyla)" if wide else ""),
                            "mlp_dim": mine[0]["mlp_dim"],
                            "parameters": mine[0]["parameters"],
                            "MFLOPs a step": round(mine[0]["step_flops"] / 1e6),
                            "training loss, 1e-3": Mean.of(1e3 * row["train/loss"] for row in mine),
                            "iid": Mean.of(row["iid/r2"] for row in mine),
                            "compositional": Mean.of(row["compositional/r2"] for row in mine),
                        }
                    )
        levels = self._levels(study)
        matched: list[Row] = []
        for method in ABLATED_METHODS:
            if study.where(method=method, wide=False):
                seeds = len(study.where(method=method, wide=False))
                scores: Row = {}
                for level in levels:
                    found = self._at_level(study, method, level)
                    # A mean over the runs that come so far would be one over the better runs.
                    scores[f"loss {level:.4f}"] = Mean.of(found.values()) if len(found) == seeds else None
                matched.append({"method": method, **scores})
        return [
            Table("Matched parameters, and matched FLOPs; R², mean and 95 % interval over seeds", rows),
            Table("Held-out R² where the training loss passes a value (–: not every run comes to it)", matched),
        ]

    def verdicts(self, study: Study) -> list[Verdict]:
        score = {
            (method, wide): per_seed(study.rows, "compositional/r2", method=method, wide=wide)
            for method in ABLATED_METHODS
            for wide in (False, True)
        }
        found = [
            compare(
                "At equal parameters HYLA composes better than softmax.", score["hyla", False], score["softmax", False]
            ),
            compare("At equal FLOPs HYLA composes better than softmax.", score["hyla", False], score["softmax", True]),
            compare("At equal FLOPs HYLA composes better than linear.", score["hyla", False], score["linear", True]),
        ]
        for level in self._levels(study):
            at = {method: self._at_level(study, method, level) for method in MAIN_METHODS}
            for other in ("softmax", "linear"):
                statement = f"At training loss {level:.4f} HYLA composes better than {other}."
                found.append(compare(statement, at["hyla"], at[other]))
        return found

    def draw(self, study: Study, stem: Path) -> list[Path]:
        curves, levels = study.extra["curves"], self._levels(study)
        with canvas(PAGE_WIDTH, 3.0, 1, 2, sharey=True) as (figure, axes):
            for place, method in enumerate(MAIN_METHODS):
                colour = colour_of(method, MAIN_METHODS)
                for seed in sorted({point["seed"] for point in curves}):
                    mine = [p for p in curves if (p["method"], p["seed"], p["wide"]) == (method, seed, False)]
                    y = [point["compositional"] for point in mine]
                    axes[0].plot([p["loss"] for p in mine], y, color=colour, linewidth=0.8, alpha=0.5)
                    axes[1].plot([p["iid"] for p in mine], y, color=colour, linewidth=0.8, alpha=0.5)
                means = [Mean.of(self._at_level(study, method, level).values()) for level in levels]
                line(axes[0], levels, means, colour, method, shift=2.0 * (place - 1))
                self._ends(axes[1], study.where(method=method, wide=False), colour, "o", None)
                self._ends(axes[1], study.where(method=method, wide=True), colour, "s", f"{method}, FLOPs of hyla")
            axes[0].set(xlabel="training loss (falls to the right)", ylabel="R² on held-out compositions", xscale="log")
            axes[0].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes[0].xaxis.set_major_formatter("{x:g}")
            axes[0].minorticks_off()
            axes[0].invert_xaxis()
            axes[1].set(xlabel="R² on seen compositions")
            if seen := [point["iid"] for point in curves if point["method"] in MAIN_METHODS]:
                margin = 0.05 * (max(seen) - min(seen))
                axes[1].set_xlim(min(seen) - margin, max(seen) + margin)
            limits(axes[0], [Mean.of([point["compositional"]]) for point in curves])
            handles = [axis.get_legend_handles_labels() for axis in axes]
            figure.legend(
                [h for pair in handles for h in pair[0]],
                [label for pair in handles for label in pair[1]],
                loc="outside lower center",
                ncols=3,
            )
            return save(figure, stem)

    def _ends(self, axes: Any, rows: Sequence[Row], colour: str, marker: str, label: str | None) -> None:
        """Where runs end: each as a faint mark, and their mean with its intervals both ways."""
        if not rows:
            return
        x, y = (Mean.of(row[f"{split}/r2"] for row in rows) for split in ("iid", "compositional"))
        inside = "none" if marker == "s" else colour
        axes.scatter(x.each, y.each, marker=marker, s=8, facecolors=inside, edgecolors=colour, alpha=0.4)
        axes.errorbar(x.value, y.value, y.half_width, x.half_width, fmt=marker, color=colour, markerfacecolor=inside,
                      linewidth=0.8, capsize=2, label=label)  # fmt: skip

    def _levels(self, study: Study) -> list[float]:
        """Training losses, evenly spaced in their logarithm, that every run of the three main methods passes."""
        curves = [p for p in study.extra["curves"] if p["method"] in MAIN_METHODS and not p["wide"]]
        runs = {(p["method"], p["seed"]) for p in curves}
        spans = [[p["loss"] for p in curves if (p["method"], p["seed"]) == run] for run in runs]
        if not spans:
            return []
        highest, lowest = min(max(span) for span in spans), max(min(span) for span in spans)
        if lowest >= highest:
            return []
        return [float(level) for level in np.geomspace(highest, lowest, LEVELS + 1)[1:]]

    def _at_level(self, study: Study, method: str, level: float) -> dict[int, float]:
        found = {}
        for seed in study.values("seed"):
            key = (method, seed, False)
            mine = [p for p in study.extra["curves"] if (p["method"], p["seed"], p["wide"]) == key]
            value = score_at_loss([p["loss"] for p in mine], [p["compositional"] for p in mine], level)
            if value is not None:
                found[seed] = value
        return found


def widened_to(config: RunConfig, flops: int) -> RunConfig:
    """The configuration with the smallest feed-forward width (in steps of 4) whose step costs at least `flops`."""
    while step_flops(config) < flops:
        config = override(config, mlp_dim=config.model.mlp_dim + 4)
    return config


def loss_and_scores(folder: Path) -> list[dict[str, float]]:
    """For every evaluation of a run whose numbers are all finite: mean training loss since the one before, scores."""
    points: list[dict[str, float]] = []
    losses: list[float] = []
    for record in read_metrics(folder):
        if record["kind"] == "train":
            losses.append(record["loss"])
        elif record["kind"] == "eval":
            if not points or points[-1]["step"] != record["step"]:
                points.append({"step": record["step"], "loss": float(np.mean(losses)) if losses else float("nan")})
                losses = []
            points[-1][record["split"]] = record["r2"]
    return [point for point in points if all(value is not None and np.isfinite(value) for value in point.values())]


def score_at_loss(losses: Sequence[float], scores: Sequence[float], level: float) -> float | None:
    """The score where a run's loss first passes `level` from above, by linear interpolation.

    >>> score_at_loss([4.0, 2.0, 1.0], [0.0, 0.5, 0.75], 1.5)
    0.625
    >>> score_at_loss([4.0, 2.0], [0.0, 0.5], 1.5) is None
    True
    """
    for index, loss in enumerate(losses):
        if loss <= level:
            if index == 0:
                return scores[0]
            share = (losses[index - 1] - level) / (losses[index - 1] - loss)
            return scores[index - 1] + share * (scores[index] - scores[index - 1])
    return None
