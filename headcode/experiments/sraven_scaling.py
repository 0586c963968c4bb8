"""SRAVEN: accuracy on seen and held-out compositions against training instances, width and depth."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.ticker import EngFormatter

from headcode.experiments._drawing import colour_of, line
from headcode.experiments._logic import MAIN_METHODS
from headcode.experiments._sraven import (
    PAPER_INSTANCES,
    PAPER_WARMUPS,
    SELECTION,
    SETTING_WORDS,
    accuracy_along,
    losses_along,
    note_ceilings,
    searched,
    select,
    sraven_base,
    widened,
    with_instances,
)
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict, compare, write_json
from headcode.experiments.mean import Mean, judge, per_seed
from headcode.nn import Transformer
from headcode.report.style import COLUMN_WIDTH, PAGE_WIDTH, canvas, legend_below, save
from headcode.run import override
from headcode.train.folder import read_run_config

SPLITS = {"iid": "seen compositions", "compositional": "held-out compositions"}
FACTORS = {"smoke": (1,), "laptop": (0.5, 1), "paper": (1, 2, 4)}
DEPTHS = {"smoke": (1, 2), "laptop": (2, 4), "paper": (4, 8, 16)}
GROUPS = ("method", "dim", "num_layers", "steps")
ABOUT_80 = 0.75
"""What still counts as the "about 80 %" that all methods come to in the paper."""


class SRavenScaling(Experiment):
    name = "sraven-scaling"
    title = "SRAVEN: scaling in data, width and depth"
    question = (
        "How does the share of puzzles with all features right, on seen and on held-out compositions of rules, grow "
        "with training instances, width and depth, and how far from what the puzzles allow does it stay?"
    )
    claim = (
        "Compositional generalisation improves with data and model size: softmax attention, linear attention and HYLA "
        "all come to about 80 % with enough of both. HYLA's lead is largest with little data and small models."
    )
    selection = f"{SELECTION} {SETTING_WORDS}"

    def runs(self, scale: Scale) -> NamedConfigs:
        base = sraven_base(scale)
        methods = ("softmax", "hyla") if scale == "smoke" else MAIN_METHODS
        most = base.steps * base.batch_size
        budgets = {"smoke": (most // 2, most), "laptop": (most,), "paper": PAPER_INSTANCES}[scale]
        for instances in budgets:
            for factor, depth in itertools.product(FACTORS[scale], DEPTHS[scale]):
                if scale == "laptop" and factor != 1 and depth != base.model.num_layers:
                    continue  # two cores have width and depth one at a time
                sized = override(widened(base, factor), num_layers=depth)
                for name, one in searched(
                    with_instances(sized, instances), scale, warmups=PAPER_WARMUPS, method=methods
                ):
                    yield f"width={factor},depth={depth},instances={instances},{name}", one

    def analyse(self, study: Study, say: Callable[[str], None]) -> None:
        """Accuracies along every run, numbers of parameters, and the oracle's ceiling."""
        curves, losses = [], []
        for row in study.rows:
            folder = Path(row["folder"])
            config = read_run_config(folder)
            row["parameters"] = sum(p.numel() for p in Transformer(config.model).parameters())
            row["instances"] = row["steps"] * row["batch_size"]
            fields = {name: row[name] for name in (*GROUPS, "seed", "learning_rate", "weight_decay", "warmup_steps")}
            curves += [{**fields, **point} for point in accuracy_along(folder, row["batch_size"])]
            losses += [{**fields, **point} for point in losses_along(folder, row["batch_size"])]
        study.extra |= {"curves": curves, "losses": losses}
        write_json(study.folder / "curves.json", curves)
        note_ceilings(study, say)

    def tables(self, study: Study) -> list[Table]:
        chosen = self._chosen(study)
        rows: list[Row] = []
        for method, dim, depth, steps in dict.fromkeys(tuple(row[g] for g in GROUPS) for row in chosen.rows):
            where = {"method": method, "dim": dim, "num_layers": depth, "steps": steps}
            first = chosen.where(**where)[0]
            row: Row = {
                "method": method,
                "dim": dim,
                "layers": depth,
                "parameters": first["parameters"],
                "instances": first["instances"],
            }
            for split in SPLITS:
                row[split] = chosen.mean(f"{split}/accuracy", **where)
                row[f"{split}, per feature"] = chosen.mean(f"{split}/feature_accuracy", **where)
            rows.append(row)
        limits = [{"split": split, **study.extra["ceilings"][split]} for split in SPLITS]
        return [
            Table("Share of puzzles with all features right, and of features; mean and 95 % interval over seeds", rows),
            Table("What the puzzles allow: the oracle's ceiling (all features), and a shortcut", limits),
        ]

    def verdicts(self, study: Study) -> list[Verdict]:
        chosen = self._chosen(study)
        rows = chosen.rows
        most = max(chosen.values("steps"))
        found = []
        for dim, depth in dict.fromkeys((row["dim"], row["num_layers"]) for row in rows):
            where = {"dim": dim, "num_layers": depth, "steps": most}
            score = {m: per_seed(rows, "compositional/accuracy", method=m, **where) for m in MAIN_METHODS}
            for other in ("softmax", "linear"):
                if score[other]:
                    statement = f"HYLA is ahead of {other} on held-out compositions (dim {dim}, {depth} layers)."
                    found.append(compare(statement, score["hyla"], score[other]))
        if len(dict.fromkeys((row["steps"], row["parameters"]) for row in rows)) > 1:
            found += self._verdicts_on_the_lead(chosen)
        if study.scale == "paper":
            found += self._verdicts_on_the_level(chosen)
        for method in chosen.values("method"):
            for axis, other, words in (("dim", "num_layers", "width"), ("num_layers", "dim", "depth")):
                base = self._base(study)
                values = sorted({row[axis] for row in rows if row[other] == base[other]})
                if len(values) > 1:
                    ends = [
                        per_seed(
                            rows,
                            "compositional/accuracy",
                            method=method,
                            steps=most,
                            **{axis: value, other: base[other]},
                        )
                        for value in (values[-1], values[0])
                    ]
                    statement = f"{method}: {words} {values[-1]} composes better than {values[0]}."
                    found.append(compare(statement, *ends))
            curves = self._curve(study, method)
            halves = {seed: _at_share(points, 0.5) for seed, points in curves.items()}
            ends_ = {seed: points[-1]["compositional"] for seed, points in curves.items()}
            found.append(compare(f"{method}: held-out accuracy still grows in the second half.", ends_, halves))
        return found

    def _verdicts_on_the_lead(self, chosen: Study) -> list[Verdict]:
        """HYLA's lead with the smallest model and the least data against that with the largest and the most."""
        sizes = sorted({(row["steps"], row["parameters"]) for row in chosen.rows})
        ends = []
        for steps, parameters in (sizes[0], sizes[-1]):
            where = {"steps": steps, "parameters": parameters}
            score = {m: per_seed(chosen.rows, "compositional/accuracy", method=m, **where) for m in MAIN_METHODS}
            ends.append({other: _lead(score["hyla"], score[other]) for other in ("softmax", "linear")})
        statement = "HYLA's lead over {} is larger with the least data and the smallest model than with the most."
        return [compare(statement.format(other), ends[0][other], ends[1][other]) for other in ("softmax", "linear")]

    def _verdicts_on_the_level(self, chosen: Study) -> list[Verdict]:
        """Whether each method comes to the paper's 0.80 with the largest model and the most data."""
        steps, parameters = max((row["steps"], row["parameters"]) for row in chosen.rows)
        found = []
        for method in chosen.values("method"):
            mean = chosen.mean("compositional/accuracy", method=method, steps=steps, parameters=parameters)
            statement = f"{method} comes to about 0.80 with the most data and the largest model"
            found.append(Verdict(f"{statement} (our bound: {ABOUT_80}).", judge(mean, ABOUT_80), str(mean)))
        return found

    def draw(self, study: Study, stem: Path) -> list[Path]:
        chosen, base = self._chosen(study), self._base(study)
        methods, most = chosen.values("method"), max(chosen.values("steps"))
        with canvas(PAGE_WIDTH, 4.3, 2, 3, sharey="row") as (figure, axes):
            for row, (split, words) in enumerate(SPLITS.items()):
                for place, method in enumerate(methods):
                    colour = colour_of(method, methods)
                    self._draw_data(study, axes[row, 0], method, split, colour)
                    for column, axis, other in ((1, "dim", "num_layers"), (2, "num_layers", "dim")):
                        values = sorted({r[axis] for r in chosen.rows if r[other] == base[other]})
                        means = [
                            chosen.mean(
                                f"{split}/accuracy", method=method, steps=most, **{axis: value, other: base[other]}
                            )
                            for value in values
                        ]
                        line(axes[row, column], values, means, colour, method, shift=3.0 * (place - 1))
                        axes[row, column].set_xscale("log", base=2)
                        axes[row, column].set_xticks(values, [str(value) for value in values])
                        axes[row, column].minorticks_off()
                ceiling = study.extra["ceilings"][split]["ceiling"]
                for panel in axes[row]:
                    panel.axhline(ceiling, color="0.3", linestyle="--", linewidth=1, label="ceiling (oracle)")
                axes[row, 0].set(ylabel=f"all features right,\n{words}", ylim=(0, 1.02))
                axes[row, 0].xaxis.set_major_formatter(EngFormatter(sep=""))
            axes[1, 0].set_xlabel("training instances")
            axes[1, 1].set_xlabel("width (heads in proportion)")
            axes[1, 2].set_xlabel("layers")
            handles, labels = axes[0, 1].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=4)
            paths = save(figure, stem)
        return [*paths, *self._draw_losses(study, stem), *self._draw_crossing(study, stem)]

    def _draw_losses(self, study: Study, stem: Path) -> list[Path]:
        """Fig. A4: the training loss of the base model along its longest runs, seed by seed."""
        methods = self._chosen(study).values("method")
        with canvas(COLUMN_WIDTH, 2.6) as (figure, axes):
            for method in methods:
                label: str | None = method
                for points in self._curve(study, method, "losses").values():
                    x, y = [p["instances"] for p in points], [p["loss"] for p in points]
                    axes.plot(x, y, color=colour_of(method, methods), linewidth=0.8, label=label)
                    label = None
            axes.set(xlabel="training instances", ylabel="training loss", ylim=(0, None))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            legend_below(figure)
            return save(figure, stem.with_name(f"{stem.name}-loss"))

    def _draw_crossing(self, study: Study, stem: Path) -> list[Path]:
        """Fig. 4, where data, width and depth are crossed: held-out accuracy by instances, a panel for each size."""
        chosen = self._chosen(study)
        methods, budgets = chosen.values("method"), sorted(chosen.values("steps"))
        widths, depths = sorted(chosen.values("dim")), sorted(chosen.values("num_layers"))
        if len(budgets) == 1:
            return []
        instances = [steps * study.rows[0]["batch_size"] for steps in budgets]
        size = (len(depths), len(widths))
        with canvas(PAGE_WIDTH, 0.6 + 1.6 * size[0], *size, sharex=True, sharey=True, squeeze=False) as (figure, axes):
            for row, depth in enumerate(depths):
                for column, dim in enumerate(widths):
                    panel = axes[row, column]
                    for place, method in enumerate(methods):
                        where = {"method": method, "dim": dim, "num_layers": depth}
                        means = [chosen.mean("compositional/accuracy", **where, steps=steps) for steps in budgets]
                        line(panel, instances, means, colour_of(method, methods), method, shift=3.0 * (place - 1))
                    ceiling = study.extra["ceilings"]["compositional"]["ceiling"]
                    panel.axhline(ceiling, color="0.3", linestyle="--", linewidth=1, label="ceiling (oracle)")
                    panel.set(title=f"width {dim}, depth {depth}", xscale="log", ylim=(0, 1.02))
                    panel.set_xticks(instances, [f"{count:,}" for count in instances], fontsize=6)
                    panel.minorticks_off()
                axes[row, 0].set_ylabel("held out")
            for panel in axes[-1]:
                panel.set_xlabel("training instances")
            legend_below(figure, *axes[0, 0].get_legend_handles_labels())
            return save(figure, stem.with_name(f"{stem.name}-crossing"))

    def _draw_data(self, study: Study, axes: Any, method: str, split: str, colour: str) -> None:
        """The base model along training; its runs of different length as points, where there are several."""
        for points in self._curve(study, method).values():
            axes.plot([p["instances"] for p in points], [p[split] for p in points], color=colour, linewidth=1)
        chosen, base = self._chosen(study), self._base(study)
        budgets = sorted(chosen.values("steps"))
        where = {"method": method, "dim": base["dim"], "num_layers": base["num_layers"]}
        means = [chosen.mean(f"{split}/accuracy", **where, steps=steps) for steps in budgets]
        instances = [steps * study.rows[0]["batch_size"] for steps in budgets]
        line(axes, instances, means, colour, method, style=":")

    def _chosen(self, study: Study) -> Study:
        return Study(study.scale, select(study, GROUPS), study.folder)

    def _base(self, study: Study) -> Row:
        model = sraven_base(study.scale).model
        return {"dim": model.dim, "num_layers": model.num_layers}

    def _curve(self, study: Study, method: str, kind: str = "curves") -> dict[int, list[Row]]:
        """By seed: the evaluations (`curves`) or training losses of the chosen base model's longest run."""
        most, base = max(study.values("steps")), self._base(study)
        wanted = [row for row in self._chosen(study).where(method=method, steps=most, **base)]
        fields = (*GROUPS, "seed", "learning_rate", "weight_decay", "warmup_steps")
        return {row["seed"]: [c for c in study.extra[kind] if all(c[f] == row[f] for f in fields)] for row in wanted}


def _lead(first: dict[int, float], second: dict[int, float]) -> dict[int, float]:
    """The difference on the seeds that both have."""
    return {seed: first[seed] - second[seed] for seed in first.keys() & second.keys()}


def _at_share(points: list[Row], share: float) -> float:
    """Held-out accuracy at the last evaluation within a share of the run's instances."""
    limit = share * points[-1]["instances"]
    return Mean.of([p["compositional"] for p in points if p["instances"] <= limit][-1:] or [0.0]).value
