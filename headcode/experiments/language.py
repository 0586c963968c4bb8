"""Language modelling: softmax, linear and HYLA with the same parameters on the same tokens, and at the same FLOPs."""

from pathlib import Path
from typing import Any, cast

from headcode.experiments._drawing import colour_of, line
from headcode.experiments._logic import MAIN_METHODS, seeds_of
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict, compare
from headcode.experiments.mean import Mean, merit, per_seed
from headcode.presets import preset
from headcode.report.style import PAGE_WIDTH, canvas, save
from headcode.run import RunConfig, override, with_task
from headcode.sweep import grid
from headcode.tasks import LanguageModelling
from headcode.tasks.language.corpus import Source, StandardLibrary, StreamedDataset
from headcode.tasks.language.prepare import prepare, prepared
from headcode.train import read_metrics
from headcode.train.cost import step_flops

METRIC = "validation/bits_per_byte"
RATES: dict[Scale, tuple[float, ...]] = {"smoke": (3e-3,), "laptop": (3e-3, 1e-2), "paper": (3e-4, 1e-3, 3e-3)}
"""Tried with every method and seed. HYLA at the FLOPs of softmax is run at one of them, its best on a laptop."""
MATCHED_RATE: dict[Scale, float] = {"smoke": 3e-3, "laptop": 1e-2, "paper": 1e-3}
MATCHED = "hyla, FLOPs of softmax"


def language_base(scale: Scale) -> RunConfig:
    """smoke: seconds, and no result; laptop: 0.46 M parameters, 0.6 M tokens of Python's sources; paper: lm-paper."""
    if scale == "paper":
        return preset("lm-paper")
    every = {"log_every": 25, "eval_every": 100, "checkpoint_every": 200}
    batches = {"batch_size": 8, "eval_batch_size": 8, "eval_size": 256}
    config = override(preset("lm-small"), vocab_size=1024, num_layers=2, steps=600, **batches, **every)
    if scale == "laptop":
        return config
    sizes = {"dim": 16, "qk_dim": 16, "v_dim": 16, "mlp_dim": 16, "context": 16, "vocab_size": 300}
    return override(config, **sizes, steps=8, log_every=2, eval_every=4, eval_size=16, checkpoint_every=0)


def with_text(config: RunConfig, scale: Scale) -> RunConfig:
    """The run on its text: Python's own sources, or C4 at the paper's scale, which must have been prepared before."""
    task = cast(LanguageModelling, config.task)
    how: dict[str, Any] = {"vocab_size": task.vocab_size, "validation": task.validation}
    if scale != "paper":
        return with_task(config, task.with_text(prepare(StandardLibrary(), **how)))
    tokens = config.steps * config.batch_size * task.context
    source: Source = StreamedDataset("c4")
    if (shards := prepared(source, **how, max_tokens=tokens + 1)) is None:
        raise ValueError(
            f"This scale reads {tokens:,} tokens of C4 (about {2 * tokens / 1e9:,.0f} GB of token shards) and takes "
            f"{training_flops(config):.1e} FLOPs for each run; prepare the text and train a first run with: "
            f"headcode train lm --preset lm-paper --method softmax --learning-rate {config.optimization.learning_rate}"
        )
    return with_task(config, task.with_text(shards))


def training_flops(config: RunConfig) -> float:
    """Arithmetic of a whole run."""
    return float(config.steps * step_flops(config))


def flop_matched(config: RunConfig, reference: RunConfig) -> RunConfig:
    """The run with as many steps as the FLOPs of the reference allow it (the nearest whole number)."""
    per_step = training_flops(config) / config.steps
    return config.replace(steps=max(round(training_flops(reference) / per_step), 1))


class Language(Experiment):
    name = "language"
    title = "Language modelling: bits per byte by method"
    question = (
        "With the same number of parameters and the same tokens in the same order, how many bits does each method need "
        "for a byte of held-out text? And when HYLA, whose step costs more, gets only as many FLOPs as softmax?"
    )
    claim = (
        "Decoders of 50 M parameters on 130 B tokens of C4: softmax attention is best, HYLA is behind it and ahead of "
        "linear attention."
    )
    selection = (
        "For each method the learning rate with the lowest mean bits per byte over the seeds, on the held-out text "
        "that is reported; last checkpoint. All rates are in the table."
    )

    def runs(self, scale: Scale) -> NamedConfigs:
        return self._grid(scale, with_text(language_base(scale), scale))

    def plan(self, scale: Scale) -> NamedConfigs:
        return self._grid(scale, language_base(scale)) if scale == "paper" else self.runs(scale)

    def _grid(self, scale: Scale, base: RunConfig) -> NamedConfigs:
        yield from grid(base, learning_rate=RATES[scale], seed=seeds_of(scale), method=MAIN_METHODS)
        for seed in seeds_of(scale):
            hyla = override(base, seed=seed, method="hyla", learning_rate=MATCHED_RATE[scale])
            matched = flop_matched(hyla, override(hyla, method="softmax"))
            if matched.steps < hyla.steps:  # a smoke run is too short to tell them apart
                yield f"seed={seed},method=hyla,FLOPs of softmax", matched

    def tables(self, study: Study) -> list[Table]:
        rows = [self._row(study, label, where) for label, where in self._groups(study).items()]
        everything = [
            self._row(study, method, self._full(study, method, rate))
            for method in MAIN_METHODS
            for rate in study.values("learning_rate")
        ]
        return [
            Table("Held-out text, mean and 95 % interval over seeds, each method at its best rate", rows),
            Table("All rates", everything),
        ]

    def _row(self, study: Study, label: str, where: Row) -> Row:
        mean = study.mean(METRIC, **where)
        return {
            "run": label,
            "rate": f"{where['learning_rate']:g}",
            "steps": where["steps"],
            "bits per byte": mean,
            "seed by seed": ", ".join(f"{value:.3f}" for value in mean.each),
            "perplexity": f"{study.mean('validation/perplexity', **where).value:.1f}",
        }

    def verdicts(self, study: Study) -> list[Verdict]:
        groups = self._groups(study)
        score = {label: per_seed(study.rows, METRIC, **where) for label, where in groups.items()}
        # Fewer bits are better: what is behind stands first.
        found = [
            compare("Softmax is ahead of HYLA (bits per byte saved).", score["hyla"], score["softmax"]),
            compare("HYLA is ahead of linear (bits per byte saved).", score["linear"], score["hyla"]),
            compare("Softmax is ahead of linear (bits per byte saved).", score["linear"], score["softmax"]),
        ]
        if MATCHED in score:
            found.append(compare("HYLA is ahead of linear at the FLOPs of softmax.", score["linear"], score[MATCHED]))
        return found

    def draw(self, study: Study, stem: Path) -> list[Path]:
        groups = self._groups(study)
        with canvas(PAGE_WIDTH, 2.6, 1, 2, width_ratios=(1.5, 1)) as (figure, axes):
            for method in MAIN_METHODS:
                curves = [_curve(Path(row["folder"])) for row in study.where(**groups[method])]
                steps = sorted(set(curves[0]).intersection(*curves[1:])) if curves else []
                tokens = [step * study.rows[0]["batch_size"] * study.rows[0]["context"] / 1e6 for step in steps]
                means = [Mean.of(curve[step] for curve in curves) for step in steps]
                line(axes[0], tokens, means, colour_of(method, MAIN_METHODS), method)
            axes[0].set(xlabel="million tokens", ylabel="bits per byte, held-out text", yscale="log")
            axes[0].yaxis.set_major_formatter("{x:.1f}")
            axes[0].yaxis.set_minor_formatter("{x:.1f}")
            axes[0].legend(loc="upper right")
            axes[0].set_title("learning curves, each method at its best rate")
            axes[1].set_title("all seeds at the end")
            for place, (label, where) in enumerate(groups.items()):
                mean = study.mean(METRIC, **where)
                colour = colour_of(where["method"], MAIN_METHODS)
                line(axes[1], [place], [mean], colour, label)
                axes[1].annotate(f"{mean.value:.3f}", (place, mean.value), xytext=(7, -2), textcoords="offset points")
            names = [label.replace(", ", ",\n") for label in groups]
            axes[1].set_xticks(range(len(groups)), names)
            axes[1].set(xlim=(-0.4, len(groups) - 0.2), ylabel="bits per byte, last step")
            return save(figure, stem)

    def _groups(self, study: Study) -> dict[str, Row]:
        """What the runs of each group have in common."""
        groups = {method: self._full(study, method, self._best_rate(study, method)) for method in MAIN_METHODS}
        fewer = min(study.values("steps"))
        if fewer < max(study.values("steps")):
            rate = next(row["learning_rate"] for row in study.rows if row["steps"] == fewer)
            groups[MATCHED] = {"method": "hyla", "learning_rate": rate, "steps": fewer}
        return groups

    def _full(self, study: Study, method: str, rate: float) -> Row:
        return {"method": method, "learning_rate": rate, "steps": max(study.values("steps"))}

    def _best_rate(self, study: Study, method: str) -> float:
        rates = study.values("learning_rate")
        fewest_bits = {rate: merit(study.mean(METRIC, **self._full(study, method, rate)), -1) for rate in rates}
        return max(rates, key=lambda rate: fewest_bits[rate])


def _curve(run: Path) -> dict[int, float]:
    """Held-out bits per byte by step."""
    records = [record for record in read_metrics(run) if record["kind"] == "eval"]
    return {record["step"]: record["bits_per_byte"] for record in records if record["split"] == "validation"}
