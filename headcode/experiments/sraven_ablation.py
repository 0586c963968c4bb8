"""SRAVEN: eight of the thirteen models of Table A1, that is, which part of HYLA matters."""

from collections.abc import Callable
from pathlib import Path

from headcode.experiments._ablation import HYLA_IS_AHEAD, PARTS_HELP, compare_methods, draw_methods
from headcode.experiments._logic import ABLATED_METHODS, MAIN_METHODS
from headcode.experiments._sraven import (
    SELECTION,
    SETTING_WORDS,
    main_seeds,
    note_ceilings,
    searched,
    seeds_of,
    select,
    sraven_base,
)
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict
from headcode.ops import METHODS
from headcode.report.style import PALETTE

SPLITS = {"iid": PALETTE[5], "compositional": PALETTE[0]}
STATEMENTS = {
    **HYLA_IS_AHEAD,
    **PARTS_HELP,
    "A nonlinear value network helps softmax attention.": ("softmax_hyla", "softmax"),
}
SMOKE_METHODS = ("softmax", "linear_rms", "hyla", "hyla_deep_linear")


class SRavenAblation(Experiment):
    name = "sraven-ablation"
    title = "SRAVEN: norm and value network, eight of the thirteen models of Table A1"
    question = "Which part of HYLA helps on SRAVEN: the norm across heads, the second layer, or its nonlinearity?"
    claim = "Both the norm across heads and the nonlinear value network contribute; HYLA with both is best."
    selection = (
        f"{SELECTION} {SETTING_WORDS} At laptop scale softmax, linear and HYLA have three seeds, the others one; "
        "differences are taken over the seeds that both have."
    )

    def runs(self, scale: Scale) -> NamedConfigs:
        methods = SMOKE_METHODS if scale == "smoke" else ABLATED_METHODS
        for method in methods:
            seeds = main_seeds(scale) if method in MAIN_METHODS else seeds_of(scale)
            yield from searched(sraven_base(scale), scale, seed=seeds, method=(method,))

    def analyse(self, study: Study, say: Callable[[str], None]) -> None:
        note_ceilings(study, say)

    def tables(self, study: Study) -> list[Table]:
        chosen = Study(study.scale, select(study, ("method",)), study.folder)
        rows: list[Row] = []
        for method in chosen.values("method"):
            norm, value_net, _ = METHODS[method]
            scores: Row = {"seeds": len(chosen.where(method=method))}
            scores["training loss"] = chosen.mean("train/loss", method=method)
            for split in SPLITS:
                scores[split] = chosen.mean(f"{split}/accuracy", method=method)
                scores[f"{split}, per feature"] = chosen.mean(f"{split}/feature_accuracy", method=method)
            rows.append({"method": method, "norm": norm, "value net": value_net, **scores})
        ceiling: Row = {split: study.extra["ceilings"][split]["ceiling"] for split in SPLITS}
        rows.append({"method": "oracle (ceiling)", **ceiling})
        return [Table("Share of puzzles with all features right; mean and 95 % interval over seeds", rows)]

    def verdicts(self, study: Study) -> list[Verdict]:
        return compare_methods(select(study, ("method",)), "accuracy", STATEMENTS)

    def draw(self, study: Study, stem: Path) -> list[Path]:
        return draw_methods(study, select(study, ("method",)), "accuracy", "all features right", SPLITS, stem)
