"""SRAVEN: eight of the thirteen models of Table A1, that is, which part of HYLA matters."""

from collections.abc import Callable
from pathlib import Path

from headcode.experiments._drawing import bars, limits, method_labels
from headcode.experiments._logic import MAIN_METHODS
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
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict, compare
from headcode.experiments.mean import per_seed
from headcode.ops import METHODS
from headcode.report.style import PAGE_WIDTH, PALETTE, canvas, save

SPLITS = {"iid": PALETTE[5], "compositional": PALETTE[0]}
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
        methods = SMOKE_METHODS if scale == "smoke" else tuple(METHODS)
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
        rows = select(study, ("method",))
        score = {method: per_seed(rows, "compositional/accuracy", method=method) for method in METHODS}
        statements = (
            ("HYLA is ahead of softmax attention.", "hyla", "softmax"),
            ("HYLA is ahead of linear attention.", "hyla", "linear"),
            ("The norm across heads helps HYLA.", "hyla", "hyla_unnormed"),
            ("The nonlinearity helps beyond a second layer.", "hyla", "hyla_deep_linear"),
            ("The norm across heads helps linear attention.", "linear_rms", "linear"),
            ("A nonlinear value network helps softmax attention.", "softmax_hyla", "softmax"),
        )
        return [compare(statement, score[better], score[worse]) for statement, better, worse in statements]

    def draw(self, study: Study, stem: Path) -> list[Path]:
        chosen = Study(study.scale, select(study, ("method",)), study.folder)
        order = [method for method in METHODS if chosen.where(method=method)]
        groups = {split: [chosen.mean(f"{split}/accuracy", method=method) for method in order] for split in SPLITS}
        with canvas(PAGE_WIDTH, 3.0) as (figure, axes):
            bars(axes, groups, method_labels(order), SPLITS)
            for split, colour in SPLITS.items():
                ceiling = study.extra["ceilings"][split]["ceiling"]
                axes.axhline(ceiling, color=colour, linestyle="--", linewidth=1, label=f"ceiling, {split}")
            axes.tick_params(axis="x", labelsize=6)
            axes.set_ylabel("all features right")
            limits(axes, [mean for means in groups.values() for mean in means])
            figure.legend(loc="outside lower center", ncols=4)
            return save(figure, stem)
