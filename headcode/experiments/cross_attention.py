"""Cross-attention: puzzle and answer slots as two sequences, against the paper's one sequence of both."""

from collections.abc import Callable, Sequence
from pathlib import Path

from headcode.experiments._drawing import bars, limits
from headcode.experiments._logic import MAIN_METHODS, logic_base
from headcode.experiments._logic import seeds_of as logic_seeds
from headcode.experiments._sraven import SETTING_WORDS, note_ceilings, sraven_base
from headcode.experiments._sraven import seeds_of as sraven_seeds
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict, compare
from headcode.experiments.mean import Mean, per_seed
from headcode.nn import Transformer
from headcode.report.style import METHOD_COLOURS, PAGE_WIDTH, canvas, save
from headcode.run import RunConfig
from headcode.sweep import grid
from headcode.train.folder import read_run_config

METRICS = {"sraven": "accuracy", "logic": "r2"}
BASES: dict[str, Callable[[Scale], RunConfig]] = {"sraven": sraven_base, "logic": logic_base}
WORDS = {"sraven": "SRAVEN, all features right", "logic": "fuzzy logic, R²"}
SPLITS = {"iid": "seen", "compositional": "held out"}


class CrossAttention(Experiment):
    name = "cross-attention"
    title = "Cross-attention: puzzle and answers as two sequences"
    question = (
        "In the paper the answer slots are tokens of the one sequence. If they are a second sequence that only attends "
        "to the puzzle, which does not know of them, does composition suffer, and does the order of the methods change?"
    )
    claim = "Not in the paper; its reviewers asked for cross-attention."
    selection = f"One rate and decay for all, last checkpoint; nothing is chosen by a score. {SETTING_WORDS}"

    def runs(self, scale: Scale) -> NamedConfigs:
        sraven, logic = sraven_base(scale), logic_base(scale)
        if scale == "smoke":
            yield from _both("sraven", sraven, range(1), ("hyla",))
            yield from _both("logic", logic, range(1), ("softmax", "hyla"))
            return
        yield from _both("sraven", sraven, sraven_seeds(scale), MAIN_METHODS)
        # Two cores have one seed of the models with cross-attention; the others are shared with logic-ablation.
        yield from _both("logic", logic, logic_seeds(scale) if scale == "paper" else range(1), MAIN_METHODS)

    def analyse(self, study: Study, say: Callable[[str], None]) -> None:
        for row in study.rows:
            config = read_run_config(Path(row["folder"]))
            row["parameters"] = sum(p.numel() for p in Transformer(config.model).parameters())
        if study.where(task="sraven"):
            note_ceilings(study, say)

    def tables(self, study: Study) -> list[Table]:
        tables = []
        for task, metric in METRICS.items():
            rows: list[Row] = []
            for method in MAIN_METHODS:
                for cross in sorted({row["cross_layers"] for row in study.where(task=task)}):
                    where = {"task": task, "method": method, "cross_layers": cross}
                    mine = study.where(**where)
                    if mine:
                        scores = {split: study.mean(f"{split}/{metric}", **where) for split in SPLITS}
                        extra = {}
                        if task == "sraven":
                            extra = {
                                f"{split}, per feature": study.mean(f"{split}/feature_accuracy", **where)
                                for split in SPLITS
                            }
                        sequences = f"two ({cross} of {mine[0]['num_layers']} layers cross)" if cross else "one"
                        sizes = {"sequences": sequences, "parameters": mine[0]["parameters"]}
                        rows.append({"method": method, **sizes, **scores, **extra})
            if task == "sraven" and rows:
                ceiling = {split: study.extra["ceilings"][split]["ceiling"] for split in SPLITS}
                rows.append({"method": "oracle (ceiling)", **ceiling})
            tables.append(Table(WORDS[task], rows))
        return tables

    def verdicts(self, study: Study) -> list[Verdict]:
        found = []
        for task, metric in METRICS.items():
            score = {
                (method, crossing): per_seed(
                    [row for row in study.where(task=task) if (row["cross_layers"] > 0) == crossing],
                    f"compositional/{metric}",
                    method=method,
                )
                for method in MAIN_METHODS
                for crossing in (False, True)
            }
            for method in MAIN_METHODS:
                if score[method, False]:
                    statement = f"{task}: {method} composes better with two sequences than with one."
                    found.append(compare(statement, score[method, True], score[method, False]))
            for other in ("softmax", "linear"):
                if score[other, True]:
                    statement = f"{task}: with two sequences HYLA is ahead of {other}."
                    found.append(compare(statement, score["hyla", True], score[other, True]))
        return found

    def draw(self, study: Study, stem: Path) -> list[Path]:
        with canvas(PAGE_WIDTH, 2.7, 1, 2) as (figure, axes):
            for panel, (task, metric) in zip(axes, METRICS.items(), strict=True):
                crossing = BASES[task](study.scale).model.num_layers // 2
                methods = [m for m in MAIN_METHODS if study.where(task=task, method=m)]
                labels: list[str] = []
                groups: dict[str, list[Mean]] = {method: [] for method in methods}
                for split, words in SPLITS.items():
                    for cross in (0, crossing):
                        labels.append(f"{words},\n{'two' if cross else 'one'}\nsequence{'s' if cross else ''}")
                        for method in methods:
                            where = {"task": task, "method": method, "cross_layers": cross}
                            groups[method].append(study.mean(f"{split}/{metric}", **where))
                bars(panel, groups, labels, METHOD_COLOURS)
                panel.tick_params(axis="x", labelsize=6.5)
                panel.set_ylabel(WORDS[task])
                limits(panel, [mean for means in groups.values() for mean in means])
                if task == "sraven" and methods:
                    for place, split in enumerate(SPLITS):
                        ceiling = study.extra["ceilings"][split]["ceiling"]
                        label = "ceiling (oracle)" if place == 0 else None
                        panel.hlines(ceiling, 2 * place - 0.45, 2 * place + 1.45, color="0.3", linestyles="--",
                                     linewidth=1, label=label)  # fmt: skip
            handles, labels = axes[0].get_legend_handles_labels()
            known = dict(zip(labels, handles, strict=True))
            known |= dict(zip(*reversed(axes[1].get_legend_handles_labels()), strict=True))
            figure.legend(list(known.values()), list(known), loc="outside lower center", ncols=4)
            return save(figure, stem)


def _both(task: str, base: RunConfig, seeds: range, methods: Sequence[str]) -> NamedConfigs:
    """One sequence, and two with half of the layers reading across."""
    crossing = base.model.num_layers // 2
    for name, config in grid(base, seed=seeds, cross_layers=(0, crossing), method=methods):
        yield f"{task},{name}", config
