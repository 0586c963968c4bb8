"""Fuzzy logic: eight of the thirteen models of Table A1, that is, which part of HYLA matters."""

from pathlib import Path

from headcode.experiments._ablation import HYLA_IS_AHEAD, PARTS_HELP, compare_methods, draw_methods
from headcode.experiments._logic import SELECTION, logic_base, paper_search, seeds_of, select
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict
from headcode.experiments.mean import Mean, per_seed
from headcode.experiments.paper import no_model_solves
from headcode.ops import METHODS
from headcode.report.style import PALETTE
from headcode.sweep import grid

SPLITS = {"iid": PALETTE[5], "compositional": PALETTE[0], "novel": PALETTE[4]}
STATEMENTS = {
    **HYLA_IS_AHEAD,
    "Softmax attention is ahead of linear attention (no claim of the paper).": ("softmax", "linear"),
    **PARTS_HELP,
}


class LogicAblation(Experiment):
    name = "logic-ablation"
    title = "Fuzzy logic: norm and value network, eight of the thirteen models of Table A1"
    question = "Which part of HYLA helps: the norm of the code across heads, the second layer, or its nonlinearity?"
    claim = (
        "As reported in Table A1 (R² × 100): a second layer in the value network helps (HYLA 81.1, without its "
        "nonlinearity 84.5, linear attention 59.9), and the norm across heads helps linear attention (68.9) but not "
        "HYLA (81.3 without). The paper sees no gain from the nonlinearity here."
    )
    selection = SELECTION

    def runs(self, scale: Scale) -> NamedConfigs:
        yield from grid(logic_base(scale), seed=seeds_of(scale), method=tuple(METHODS), **paper_search(scale))

    def tables(self, study: Study) -> list[Table]:
        chosen = Study(study.scale, select(study, ("method",)), study.folder)
        rows: list[Row] = []
        for method in chosen.values("method"):
            scores = {split: chosen.mean(f"{split}/r2", method=method) for split in SPLITS}
            norm, value_net, _ = METHODS[method]
            each = ", ".join(f"{value:.3f}" for value in scores["compositional"].each)
            rows.append({"method": method, "norm": norm, "value net": value_net, **scores, "seed by seed": each})
        return [Table("R², mean and 95 % interval over seeds; the last column is compositional", rows)]

    def verdicts(self, study: Study) -> list[Verdict]:
        rows = select(study, ("method",))
        novel = {
            method: Mean.of(per_seed(rows, "novel/r2", method=method).values()) for method in study.values("method")
        }
        return [*compare_methods(rows, "r2", STATEMENTS), no_model_solves(novel)]

    def draw(self, study: Study, stem: Path) -> list[Path]:
        return draw_methods(study, select(study, ("method",)), "r2", "R²", SPLITS, stem)
