"""Fuzzy logic: eight of the thirteen models of Table A1, that is, which part of HYLA matters."""

from pathlib import Path

from headcode.experiments._drawing import bars, limits, method_labels
from headcode.experiments._logic import SELECTION, logic_base, paper_search, seeds_of, select
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict, compare
from headcode.experiments.mean import per_seed
from headcode.ops import METHODS
from headcode.report.style import PAGE_WIDTH, PALETTE, canvas, save
from headcode.sweep import grid

SPLITS = {"iid": PALETTE[5], "compositional": PALETTE[0], "novel": PALETTE[4]}


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
        score = {method: per_seed(rows, "compositional/r2", method=method) for method in METHODS}
        statements = (
            ("HYLA is ahead of softmax attention.", "hyla", "softmax"),
            ("HYLA is ahead of linear attention.", "hyla", "linear"),
            ("Softmax attention is ahead of linear attention (no claim of the paper).", "softmax", "linear"),
            ("The norm across heads helps HYLA.", "hyla", "hyla_unnormed"),
            ("The nonlinearity helps beyond a second layer.", "hyla", "hyla_deep_linear"),
            ("The norm across heads helps linear attention.", "linear_rms", "linear"),
        )
        return [compare(statement, score[better], score[worse]) for statement, better, worse in statements]

    def draw(self, study: Study, stem: Path) -> list[Path]:
        chosen = Study(study.scale, select(study, ("method",)), study.folder)
        order = [method for method in METHODS if chosen.where(method=method)]
        groups = {split: [chosen.mean(f"{split}/r2", method=method) for method in order] for split in SPLITS}
        with canvas(PAGE_WIDTH, 3.0) as (figure, axes):
            bars(axes, groups, method_labels(order), SPLITS)
            axes.tick_params(axis="x", labelsize=6)
            axes.set_ylabel("R²")
            limits(axes, [mean for means in groups.values() for mean in means])
            figure.legend(loc="outside lower center", ncols=3)
            return save(figure, stem)
