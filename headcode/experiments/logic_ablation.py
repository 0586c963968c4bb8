"""Fuzzy logic: Table A1, that is, which part of HYLA matters."""

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
from headcode.experiments._logic import SELECTION, logic_base, paper_search, seeds_of, select
from headcode.experiments._table_a1 import TABLE_A1
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict
from headcode.experiments.mean import Mean, per_seed
from headcode.experiments.paper import no_model_solves
from headcode.report.style import PALETTE

SPLITS = {"iid": PALETTE[5], "compositional": PALETTE[0], "novel": PALETTE[4]}
STATEMENTS = {
    **HYLA_IS_AHEAD,
    "Softmax attention is ahead of linear attention (no claim of the paper).": ("softmax", "linear"),
    **PARTS_HELP,
    **MORE_PARAMETERS,
}


class LogicAblation(Experiment):
    name = "logic-ablation"
    title = "Fuzzy logic: norm and value network, the thirteen models of Table A1"
    question = "Which part of HYLA helps: the norm of the code across heads, the second layer, or its nonlinearity?"
    claim = (
        "As reported in Table A1 (R² × 100): a second layer in the value network helps (HYLA 81.1, without its "
        "nonlinearity 84.5, linear attention 59.9), and the norm across heads helps linear attention (68.9) but not "
        "HYLA (81.3 without). The paper sees no gain from the nonlinearity here."
    )
    selection = SELECTION

    def runs(self, scale: Scale) -> NamedConfigs:
        yield from models_runs(logic_base(scale), seeds_of(scale), tuple(TABLE_A1), **paper_search(scale))

    def tables(self, study: Study) -> list[Table]:
        chosen = chosen_models(study, select)
        rows: list[Row] = []
        for model in chosen.values("model"):
            scores = {split: chosen.mean(f"{split}/r2", model=model) for split in SPLITS}
            each = ", ".join(f"{value:.3f}" for value in scores["compositional"].each)
            rows.append(model_columns(chosen, model, {**scores, "seed by seed": each}))
        return [Table("R², mean and 95 % interval over seeds; `seed by seed` is compositional", rows)]

    def verdicts(self, study: Study) -> list[Verdict]:
        chosen = chosen_models(study, select)
        novel = {
            model: Mean.of(per_seed(chosen.rows, "novel/r2", model=model).values()) for model in chosen.values("model")
        }
        return [*compare_models(chosen, "r2", STATEMENTS), no_model_solves(novel)]

    def draw(self, study: Study, stem: Path) -> list[Path]:
        return draw_models(chosen_models(study, select), "logic", "r2", "R²", SPLITS, stem)
