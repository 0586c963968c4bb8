"""SRAVEN on two cores: what each part of the preset `sraven-fast` gives, one change at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headcode.experiments._sraven import note_ceilings, seeds_of, shortened, widened
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict, compare
from headcode.experiments.mean import per_seed
from headcode.presets import preset
from headcode.report.style import PAGE_WIDTH, PALETTE, canvas, save
from headcode.run import RunConfig, override

SPLITS = {"iid": PALETTE[5], "compositional": PALETTE[0]}
RECIPE = "the recipe"
CHANGES: dict[str, dict[str, Any]] = {
    RECIPE: {},
    "no hints": {"auxiliary_weight": 0.0},
    "AdamW, not Muon": {"optimizer": "adamw"},
    "every token its own position": {"position_period": None},
    "relative positions alone": {"position": "relative", "position_period": None},
    "learned positions alone": {"position": "learned"},
    "values as narrow as the paper's": {"v_dim": preset("sraven").model.v_dim},
    "cosine from the start": {"schedule": "cosine"},
    "attention dropout 0.1": {"attention_dropout": 0.1},
}
SMOKE = (RECIPE, "no hints", "AdamW, not Muon")
LAPTOP_STEPS = 1500
"""Half of what the experiments without hints have: fifteen variants are many."""


def variants(scale: Scale) -> dict[str, RunConfig]:
    """By name: the recipe with one thing changed. Batch size and shape keep instances and FLOPs (to an eighth)."""
    base = override(preset("sraven-fast"), method="hyla")
    if scale != "paper":
        base = shortened(base, scale)
    if scale == "laptop":
        base = override(base, steps=LAPTOP_STEPS)
    found = {name: override(base, **changes) for name, changes in CHANGES.items()}
    if scale == "smoke":
        return {name: found[name] for name in SMOKE}
    steps, batch_size, layers = base.steps, base.batch_size, base.model.num_layers
    puzzles = steps * batch_size
    found["aligned puzzles first"] = override(base, aligned=((0.0, 0.8), (0.5 * puzzles, 0.0)))
    found["aligned puzzles first, no hints"] = override(found["aligned puzzles first"], auxiliary_weight=0.0)
    found["half the batch, twice the steps"] = override(base, batch_size=batch_size // 2, steps=2 * steps)
    found["twice the batch, half the steps"] = override(base, batch_size=2 * batch_size, steps=steps // 2)
    found["3/4 as deep, 1.125 times as wide"] = override(widened(base, 1.125), num_layers=layers * 3 // 4)
    found["twice as deep, 0.75 times as wide"] = override(widened(base, 0.75), num_layers=2 * layers)
    return found


class SRavenRecipe(Experiment):
    name = "sraven-recipe"
    title = "SRAVEN on two cores: what each part of the fast recipe gives"
    question = (
        "The preset sraven-fast differs from the paper in hints, width of values, optimiser, positions, schedule and "
        "dropout. What does each give, and what do batch size and shape, when one thing at a time is changed?"
    )
    claim = "The paper has no such recipe: nothing to agree or disagree with."
    selection = (
        "The last checkpoint counts; nothing is chosen. Laptop scale has puzzles of 2 features and few steps: "
        "what helps there need not help with 4. The recipe was found by watching `hyla` alone."
    )

    def runs(self, scale: Scale) -> NamedConfigs:
        for seed in seeds_of(scale):
            for name, config in variants(scale).items():
                yield f"{name}, seed={seed}", override(config, seed=seed)

    def analyse(self, study: Study, say: Callable[[str], None]) -> None:
        note_ceilings(study, say)

    def tables(self, study: Study) -> list[Table]:
        rows: list[Row] = []
        for name, chosen in _by_variant(study).items():
            scores: Row = {}
            for split in SPLITS:
                scores[split] = chosen.mean(f"{split}/accuracy")
                scores[f"{split}, per feature"] = chosen.mean(f"{split}/feature_accuracy")
            rows.append({"variant": name, **scores})
        rows.append(
            {"variant": "oracle (ceiling)", **{split: study.extra["ceilings"][split]["ceiling"] for split in SPLITS}}
        )
        return [Table("Share of puzzles with all features right; mean and 95 % interval over seeds", rows)]

    def verdicts(self, study: Study) -> list[Verdict]:
        score = {
            name: per_seed(chosen.rows, "compositional/accuracy") for name, chosen in _by_variant(study).items()
        }  # fmt: skip
        recipe = score.pop(RECIPE)
        return [compare(f"The recipe is ahead of: {name}.", recipe, other) for name, other in score.items()]

    def draw(self, study: Study, stem: Path) -> list[Path]:
        found = _by_variant(study)
        with canvas(PAGE_WIDTH, 0.9 + 0.27 * len(found)) as (figure, axes):
            for row, chosen in enumerate(found.values()):
                for split, colour in SPLITS.items():
                    mean = chosen.mean(f"{split}/accuracy")
                    at = row + (0.12 if split == "iid" else -0.12)
                    axes.plot(mean.each, [at] * len(mean.each), "o", color=colour, label=split if row == 0 else None)
                    if mean.half_width is not None:
                        axes.errorbar(mean.value, at, xerr=mean.half_width, color=colour, linewidth=0.8, capsize=2)
            for split, colour in SPLITS.items():
                ceiling = study.extra["ceilings"][split]["ceiling"]
                axes.axvline(ceiling, color=colour, linestyle="--", linewidth=1, label=f"ceiling, {split}")
                reached = found[RECIPE].mean(f"{split}/accuracy").value
                axes.axvline(reached, color=colour, linewidth=0.6, alpha=0.6, label=f"{RECIPE}, {split}")
            axes.set_yticks(range(len(found)), list(found))
            axes.invert_yaxis()
            axes.set_xlim(-0.02, 1.02)
            axes.set_xlabel("all features right")
            figure.legend(loc="outside lower center", ncols=3)
            return save(figure, stem)


def _by_variant(study: Study) -> dict[str, Study]:
    """The rows of each variant, by name: several of them differ from the recipe in more than one field."""
    found: dict[str, list[Row]] = {name: [] for name in variants(study.scale)}
    for row in study.rows:
        found[row["name"].partition(": ")[2].rpartition(", seed=")[0]].append(row)
    return {name: Study(study.scale, rows, study.folder) for name, rows in found.items()}
