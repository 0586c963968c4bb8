"""SRAVEN: Table A1, that is, which part of HYLA matters."""

from collections.abc import Callable
from pathlib import Path

from headcode.experiments._ablation import (
    HYLA_IS_AHEAD,
    MORE_PARAMETERS,
    PARTS_HELP,
    chosen_models,
    compare_models,
    draw_models,
    model_columns,
    models_runs,
)
from headcode.experiments._logic import MAIN_METHODS
from headcode.experiments._sraven import (
    ABLATION_INSTANCES,
    SELECTION,
    SETTING_WORDS,
    main_seeds,
    note_ceilings,
    paper_search,
    seeds_of,
    select,
    sraven_base,
    with_instances,
)
from headcode.experiments._table_a1 import TABLE_A1
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict
from headcode.report.style import PALETTE

SPLITS = {"iid": PALETTE[5], "compositional": PALETTE[0]}
STATEMENTS = {
    **HYLA_IS_AHEAD,
    **PARTS_HELP,
    **MORE_PARAMETERS,
    "A nonlinear value network helps softmax attention.": ("softmax_hyla", "softmax"),
}
SMOKE_MODELS = ("softmax", "linear_rms", "hyla", "hyla_deep_linear")


class SRavenAblation(Experiment):
    name = "sraven-ablation"
    title = "SRAVEN: norm and value network, the thirteen models of Table A1"
    question = "Which part of HYLA helps on SRAVEN: the norm across heads, the second layer, or its nonlinearity?"
    claim = "Both the norm across heads and the nonlinear value network contribute; HYLA with both is best."
    selection = (
        f"{SELECTION} {SETTING_WORDS} At laptop scale softmax, linear and HYLA have three seeds, the others one; "
        "differences are taken over the seeds that both have."
    )

    def runs(self, scale: Scale) -> NamedConfigs:
        base = sraven_base(scale)
        if scale == "paper":
            base = with_instances(base, ABLATION_INSTANCES)
        models = SMOKE_MODELS if scale == "smoke" else tuple(TABLE_A1)
        for model in models:
            seeds = main_seeds(scale) if model in MAIN_METHODS else seeds_of(scale)
            yield from models_runs(base, seeds, (model,), **paper_search(scale))

    def analyse(self, study: Study, say: Callable[[str], None]) -> None:
        note_ceilings(study, say)

    def tables(self, study: Study) -> list[Table]:
        chosen = chosen_models(study, select)
        rows: list[Row] = []
        for model in chosen.values("model"):
            scores: Row = {"training loss": chosen.mean("train/loss", model=model)}
            for split in SPLITS:
                scores[split] = chosen.mean(f"{split}/accuracy", model=model)
                scores[f"{split}, per feature"] = chosen.mean(f"{split}/feature_accuracy", model=model)
            rows.append(model_columns(chosen, model, scores))
        ceiling: Row = {split: study.extra["ceilings"][split]["ceiling"] for split in SPLITS}
        rows.append({"model": "oracle (ceiling)", **ceiling})
        return [Table("Share of puzzles with all features right; mean and 95 % interval over seeds", rows)]

    def verdicts(self, study: Study) -> list[Verdict]:
        return compare_models(chosen_models(study, select), "accuracy", STATEMENTS)

    def draw(self, study: Study, stem: Path) -> list[Path]:
        return draw_models(chosen_models(study, select), "sraven", "accuracy", "all features right", SPLITS, stem)
