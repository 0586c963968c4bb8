"""In-context learning as optimisation: trained models against algorithms on the same contexts, and the exact identity
between one layer of linear attention and one gradient step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcode.analysis import open_run
from headcode.experiments import _one_step
from headcode.experiments._drawing import colour_of, limits, line
from headcode.experiments._logic import MAIN_METHODS, SELECTION, logic_base, paper_search, seeds_of, select
from headcode.experiments._regression import algorithms
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict, compare, write_json
from headcode.experiments.mean import Mean
from headcode.nn import Transformer
from headcode.report.style import GREY, PAGE_WIDTH, PALETTE, canvas, save
from headcode.sweep import grid
from headcode.tasks import Batch, FuzzyLogic, add_sums

SPLITS = ("iid", "compositional", "novel")
DRAWN = {
    "least squares, inputs": (PALETTE[2], "--"),
    "one gradient step, minterms": (PALETTE[3], ":"),
    "100 gradient steps, minterms": (PALETTE[3], "-."),
    "least squares, minterms": (PALETTE[3], "--"),
    "nearest point": (GREY, "--"),
    "best-fitting function": ("black", ":"),
}
CHUNK = 512


class InContext(Experiment):
    name = "in-context"
    needs_weights = True
    title = "In-context learning as optimisation: models against algorithms on the same contexts"
    question = (
        "Which algorithm on the context's points predicts as well as a trained model, and like it: gradient steps, "
        "least squares, the nearest point? And is one layer of linear attention one gradient step?"
    )
    claim = (
        "The paper starts from the view that attention can carry out optimisation in context; that one layer of linear "
        "attention can take one gradient step on linear regression is by von Oswald et al. (2023). Neither compares "
        "models with algorithms on fuzzy logic."
    )
    selection = (
        SELECTION + " Step sizes and penalties of the algorithms are chosen by their error on training compositions, "
        "for every context length."
    )

    def runs(self, scale: Scale) -> NamedConfigs:
        base = logic_base(scale)
        if scale == "smoke":
            yield from grid(base, seed=(0,), method=MAIN_METHODS)
            return
        # Two cores have one length, in runs that other experiments share; at every scale contexts are also cut short.
        points = (32,) if scale == "laptop" else (16, 32, 64, 96)
        yield from grid(base, seed=seeds_of(scale), num_points=points, method=MAIN_METHODS, **paper_search(scale))

    def analyse(self, study: Study, say: Callable[[str], None]) -> None:
        size = 128 if study.scale == "smoke" else 4096
        setting = _one_step.Setting(steps=60, test_size=512) if study.scale == "smoke" else _one_step.Setting()
        scores: list[Row] = []
        rows = select(study, ("num_points", "method"))
        for points, seed in dict.fromkeys((row["num_points"], row["seed"]) for row in rows):
            mine = [row for row in rows if (row["num_points"], row["seed"]) == (points, seed)]
            say(f"algorithms and models on the same contexts: N={points}, seed {seed}")
            scores += compare_on_contexts({row["method"]: Path(row["folder"]) for row in mine}, size)
        say("one layer of linear attention, constructed and trained")
        study.extra["scores"] = scores
        study.extra["identity"] = _one_step.identity_error()
        study.extra["trained"] = [
            look for seed in seeds_of(study.scale) for look in _one_step.train(setting, seed)
        ]  # (seed, step)
        content = {key: study.extra[key] for key in ("scores", "identity", "trained")}
        write_json(study.folder / "in-context.json", content)

    def tables(self, study: Study) -> list[Table]:
        tables = []
        for points in study.values("num_points"):
            rows: list[Row] = []
            for who in dict.fromkeys(s["who"] for s in study.extra["scores"]):
                row: Row = {"model or algorithm": who}
                for split in SPLITS:
                    row[split] = self._mean(study, who, split, points, points - 1)
                for method in MAIN_METHODS:
                    row[f"distance from {method}"] = Mean.of(self._distances(study, who, method, points))
                rows.append(row)
            title = f"R² with N={points} ({points - 1} visible points), and root mean square distance from the models' "
            tables.append(Table(title + "predictions on held-out compositions", rows))
        largest = max(study.values("num_points"))
        lengths = sorted({s["context"] for s in study.extra["scores"] if s["points"] == largest})
        rows = []
        for who in dict.fromkeys(s["who"] for s in study.extra["scores"]):
            means = {f"{n} points": self._mean(study, who, "compositional", largest, n) for n in lengths}
            rows.append({"model or algorithm": who, **means})
        tables.append(Table(f"R² on held-out compositions when the N={largest} contexts are cut short", rows))
        last = [
            look for look in study.extra["trained"] if look["step"] == max(t["step"] for t in study.extra["trained"])
        ]
        names = {
            "loss": "squared error",
            "step_loss": "of one tuned gradient step",
            "difference": "relative difference of predictions",
            "cosine": "cosine of sensitivities",
            "ratio": "ratio of their lengths",
        }
        means = {words: Mean.of(look[key] for look in last) for key, words in names.items()}
        steps = last[0]["step"]
        tables.append(Table(f"One layer of linear attention after {steps} steps on linear regression", [means]))
        return tables

    def verdicts(self, study: Study) -> list[Verdict]:
        error = study.extra["identity"]
        last = max(look["step"] for look in study.extra["trained"])
        ends = [look for look in study.extra["trained"] if look["step"] == last]
        found = [
            Verdict(
                "One layer of linear attention with constructed weights takes exactly one gradient step.",
                error < 1e-12,
                f"largest difference {error:.1e} in float64, over four sizes and two rates",
            ),
            Verdict(
                "Trained on linear regression it comes to predict like one tuned gradient step (predictions within "
                "5 %, cosine of sensitivities above 0.99).",
                _all_or_none([look["difference"] < 0.05 and look["cosine"] > 0.99 for look in ends]),
                "; ".join(f"seed {e['seed']}: {e['difference']:.3f} and {e['cosine']:.4f}" for e in ends),
            ),
        ]
        for points in study.values("num_points"):
            for who in ("least squares, inputs", "least squares, minterms", "nearest point"):
                for method in MAIN_METHODS:
                    statement = f"{method} predicts held-out compositions better than {who}, N={points}."
                    found.append(compare(statement, *(self._by_seed(study, w, points) for w in (method, who))))
        return found

    def draw(self, study: Study, stem: Path) -> list[Path]:
        scores, largest = study.extra["scores"], max(study.values("num_points"))
        lengths = sorted({s["context"] for s in scores if s["points"] == largest})
        with canvas(PAGE_WIDTH, 3.4, 1, 3, width_ratios=(1.15, 1, 1)) as (figure, axes):
            for who, (colour, style) in DRAWN.items():
                means = [self._mean(study, who, "compositional", largest, n) for n in lengths]
                axes[0].plot(lengths, [m.value for m in means], style, color=colour, linewidth=1, label=who)
            for place, method in enumerate(MAIN_METHODS):
                means = [self._mean(study, method, "compositional", largest, n) for n in lengths]
                label, shift = f"{method} (trained, N={largest})", 2.0 * (place - 1)
                line(axes[0], lengths, means, colour_of(method, MAIN_METHODS), label, shift=shift)
            axes[0].set_xscale("log", base=2)
            axes[0].set_xticks([n for n in lengths], [str(n) for n in lengths])
            axes[0].minorticks_off()
            axes[0].set(xlabel="visible points", ylabel="R² on held-out compositions")
            drawn = (*DRAWN, *MAIN_METHODS)
            limits(axes[0], [self._mean(study, who, "compositional", largest, n) for who in drawn for n in lengths])
            axes[0].set_title(f"contexts of N={largest}, cut short")
            self._draw_distances(study, axes[1], largest)
            self._draw_training(study, axes[2])
            entries = [axes[panel].get_legend_handles_labels() for panel in (0, 2)]
            handles, labels = ([entry for pair in entries for entry in pair[part]] for part in (0, 1))
            figure.legend(handles, labels, loc="outside lower center", ncols=3)
            return save(figure, stem)

    def _draw_distances(self, study: Study, axes: Any, points: int) -> None:
        for place, who in enumerate(DRAWN):
            for index, method in enumerate(MAIN_METHODS):
                values = self._distances(study, who, method, points)
                at = place + (index - 1) * 0.25
                mean = Mean.of(values)
                axes.barh(at, mean.value, 0.22, color=colour_of(method, MAIN_METHODS), alpha=0.75)
                if mean.half_width is not None:
                    axes.errorbar(mean.value, at, xerr=mean.half_width, color="0.35", linewidth=0.8, capsize=1.5)
                axes.scatter(values, [at] * len(values), s=5, color="black", linewidths=0, zorder=3)
        axes.set_yticks(range(len(DRAWN)), [who.replace(", ", ",\n").replace(" steps", "\nsteps") for who in DRAWN])
        axes.tick_params(axis="y", labelsize=6)
        axes.invert_yaxis()
        axes.set(xlabel="distance of predictions\nfrom the model's (RMS)", title="whose answers are like the models'")

    def _draw_training(self, study: Study, axes: Any) -> None:
        looks = study.extra["trained"]
        for key, words, colour in (
            ("cosine", "right: cosine of sensitivities", PALETTE[5]),
            ("difference", "right: difference of predictions", PALETTE[6]),
        ):
            for seed in sorted({look["seed"] for look in looks}):
                mine = [look for look in looks if look["seed"] == seed]
                x, y = [look["step"] for look in mine], [look[key] for look in mine]
                axes.plot(x, y, color=colour, linewidth=1, label=words if seed == 0 else None)
        axes.set_xscale("symlog", linthresh=1)
        axes.axhline(1, color=GREY, linewidth=0.6, zorder=0)
        axes.axhline(0, color=GREY, linewidth=0.6, zorder=0)
        # At first its predictions may be many times off: above 1 the axis goes on in powers.
        furthest = max(max(look["difference"] for look in looks), 1.0)
        axes.set_yscale("symlog", linthresh=1)
        ticks = [tick for tick in (0, 0.5, 1, 2, 5, 10, 100, 1000) if tick <= 1.3 * furthest]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        lowest = min(-0.15, min(look["cosine"] for look in looks) - 0.05)
        axes.set(xlabel="training step", ylim=(lowest, 1.3 * furthest))
        axes.set_title("one layer of linear attention\nagainst one gradient step")

    def _scores(self, study: Study, who: str, split: str, points: int, context: int) -> list[Row]:
        key = (who, split, points, context)
        return [s for s in study.extra["scores"] if (s["who"], s["split"], s["points"], s["context"]) == key]

    def _mean(self, study: Study, who: str, split: str, points: int, context: int) -> Mean:
        return Mean.of(s["r2"] for s in self._scores(study, who, split, points, context))

    def _distances(self, study: Study, who: str, method: str, points: int) -> list[float]:
        """From a model's predictions on held-out compositions, on the seeds that have the model."""
        scores = self._scores(study, who, "compositional", points, points - 1)
        return [s[f"from {method}"] for s in scores if f"from {method}" in s]

    def _by_seed(self, study: Study, who: str, points: int) -> dict[int, float]:
        return {s["seed"]: s["r2"] for s in self._scores(study, who, "compositional", points, points - 1)}


def compare_on_contexts(folders: dict[str, Path], size: int) -> list[Row]:
    """R² of models and algorithms on the first `size` instances of every split, for whole and shortened contexts.

    `folders` are runs on the same task, by method. A context is shortened to its last points; the variance that R²
    divides by stays that of all points. `from METHOD` is the root mean square distance from a model's predictions.
    """
    opened = {method: open_run(folder) for method, folder in folders.items()}
    run = next(iter(opened.values()))
    task, seed = run.task, run.config.seed
    assert isinstance(task, FuzzyLogic)
    train = _instances(task, "train", size)
    found: list[Row] = []
    for context in context_lengths(task.num_points):
        cut = slice(-context - 1, None)
        predictors: dict[str, Callable[[Tensor], Tensor]] = {
            algorithm.name: algorithm.predict for algorithm in algorithms(task, train.x[:, cut], train.y[:, 0])
        }
        for split in SPLITS:
            batch = _instances(task, split, size)
            x = batch.x[:, cut]
            answers = {method: _model_answers(each.model, x) for method, each in opened.items()}
            answers |= {name: predict(x) for name, predict in predictors.items()}
            for who, answer in answers.items():
                sums = add_sums({}, task.score(answer[:, None], batch))
                row = {"who": who, "seed": seed, "points": task.num_points, "context": context, "split": split}
                distances = {
                    f"from {method}": float((answer - answers[method]).square().mean().sqrt()) for method in opened
                }
                found.append({**row, **task.metrics(sums), **distances})
    return found


def context_lengths(num_points: int) -> list[int]:
    """Visible points: all of them, and one less than the powers of two below.

    >>> context_lengths(32)
    [1, 3, 7, 15, 31]
    """
    lengths = [2**i - 1 for i in range(1, num_points.bit_length() + 1) if 2**i <= num_points]
    return sorted({*lengths, num_points - 1})


def _all_or_none(met: Sequence[bool]) -> bool | None:
    """Whether every seed meets a condition, or none; in between, and with one seed, nobody can tell."""
    return met[0] if len(met) > 1 and len(set(met)) == 1 else None


def _instances(task: FuzzyLogic, split: str, size: int) -> Batch:
    return task.instances(split, np.arange(size))


def _model_answers(model: Transformer, x: Tensor) -> Tensor:
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        parts: Sequence[Tensor] = [model(part.to(dtype), queries=slice(-1, None)) for part in x.split(CHUNK)]
    return torch.cat(list(parts))[:, 0, 0].double()
