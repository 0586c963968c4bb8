"""Fuzzy logic: generalisation to held-out compositions, by method, held-out share and context length."""

from collections.abc import Sequence
from pathlib import Path

from headcode.experiments._drawing import colour_of, limits, line
from headcode.experiments._logic import MAIN_METHODS, SELECTION, logic_base, paper_search, seeds_of, select
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict, compare
from headcode.experiments.mean import Mean, per_seed
from headcode.report.style import PAGE_WIDTH, canvas, save
from headcode.sweep import grid

SPLITS = ("iid", "compositional", "novel")
SHARES: dict[Scale, dict[int, tuple[float, ...]]] = {
    "smoke": {8: (0.5, 0.7), 16: (0.5, 0.7)},
    "laptop": {16: (0.3, 0.7), 32: (0.7,)},
    "paper": {16: (0.3, 0.5, 0.7), 32: (0.3, 0.5, 0.7), 64: (0.3, 0.5, 0.7), 96: (0.3, 0.5, 0.7)},
}
"""By scale and number of points: the held-out shares. Two cores have fewer, with N=32 in runs that others share."""


class LogicGeneralisation(Experiment):
    name = "logic-generalisation"
    title = "Fuzzy logic: held-out compositions, by method, held-out share and context"
    question = (
        "How well does each method predict functions whose combination of terms was not in training, when more or "
        "fewer of the combinations are held out and the context has N points?"
    )
    claim = (
        "HYLA generalises best to held-out compositions, and declines least when more of them are held out or contexts "
        "are shorter."
    )
    selection = SELECTION

    def runs(self, scale: Scale) -> NamedConfigs:
        for points, shares in SHARES[scale].items():
            yield from grid(
                logic_base(scale),
                seed=seeds_of(scale),
                num_points=(points,),
                held_out=shares,
                method=MAIN_METHODS,
                **paper_search(scale),
            )

    def tables(self, study: Study) -> list[Table]:
        rows: list[Row] = []
        chosen = Study(study.scale, select(study, ("num_points", "held_out", "method")), study.folder)
        for points, share in _settings(chosen):
            for method in chosen.values("method"):
                where = {"num_points": points, "held_out": share, "method": method}
                scores = {split: chosen.mean(f"{split}/r2", **where) for split in SPLITS}
                rows.append({"N": points, "held out": share, "method": method, **scores})
        return [Table("R², mean and 95 % interval over seeds", rows)]

    def verdicts(self, study: Study) -> list[Verdict]:
        rows = select(study, ("num_points", "held_out", "method"))
        found = []
        for points, share in _settings(study):
            score = {
                method: per_seed(rows, "compositional/r2", num_points=points, held_out=share, method=method)
                for method in MAIN_METHODS
            }
            where = f"with N={points} and {share:.0%} held out"
            found.append(compare(f"HYLA is ahead of softmax {where}.", score["hyla"], score["softmax"]))
            found.append(compare(f"HYLA is ahead of linear {where}.", score["hyla"], score["linear"]))
            found.append(
                compare(
                    f"Softmax is ahead of linear {where} (no claim of the paper).", score["softmax"], score["linear"]
                )
            )
        return [*found, *_declines(rows)]

    def draw(self, study: Study, stem: Path) -> list[Path]:
        points, every_share = study.values("num_points"), study.values("held_out")
        rows = select(study, ("num_points", "held_out", "method"))
        chosen = Study(study.scale, rows, study.folder)
        height = 0.6 + 1.9 * len(points)
        with canvas(PAGE_WIDTH, height, len(points), len(SPLITS), sharey="row", squeeze=False) as (figure, axes):
            for row, count in enumerate(points):
                everything: list[Mean] = []
                shares = [share for length, share in _settings(study) if length == count]
                for column, split in enumerate(SPLITS):
                    for place, method in enumerate(MAIN_METHODS):
                        means = [
                            chosen.mean(f"{split}/r2", num_points=count, held_out=share, method=method)
                            for share in shares
                        ]
                        everything += means
                        colour = colour_of(method, MAIN_METHODS)
                        line(axes[row, column], shares, means, colour, method, shift=3.0 * (place - 1))
                    axes[row, column].set_xlim(min(every_share) - 0.05, max(every_share) + 0.05)
                    axes[row, column].set_xticks(every_share, [f"{share:.0%}" for share in every_share])
                    axes[0, column].set_title({"iid": "seen compositions", "compositional": "held-out compositions",
                                               "novel": "terms never seen"}[split])  # fmt: skip
                    axes[-1, column].set_xlabel("compositions held out")
                axes[row, 0].set_ylabel(f"R², N = {count}")
                limits(axes[row, 0], everything)
            handles, labels = axes[0, 0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=3)
            return save(figure, stem)


def _declines(rows: Sequence[Row]) -> list[Verdict]:
    """Whether HYLA loses less than the others when more is held out, and when contexts are shorter."""
    every_length, every_share = (sorted({row[field] for row in rows}) for field in ("num_points", "held_out"))
    changes = []
    for points in every_length:
        shares = sorted({row["held_out"] for row in rows if row["num_points"] == points})
        easy, hard = ({"num_points": points, "held_out": share} for share in (shares[0], shares[-1]))
        changes.append((f"from {shares[0]:.0%} to {shares[-1]:.0%} held out, N={points}", easy, hard))
    for share in every_share:
        lengths = sorted({row["num_points"] for row in rows if row["held_out"] == share})
        easy, hard = ({"num_points": points, "held_out": share} for points in (lengths[-1], lengths[0]))
        changes.append((f"from N={lengths[-1]} to N={lengths[0]}, {share:.0%} held out", easy, hard))
    found = []
    for words, easy, hard in changes:
        if easy == hard:
            continue
        change = {}
        for method in MAIN_METHODS:
            before, after = (per_seed(rows, "compositional/r2", method=method, **where) for where in (easy, hard))
            change[method] = {seed: after[seed] - before[seed] for seed in before.keys() & after.keys()}
        for other in ("softmax", "linear"):
            found.append(compare(f"HYLA declines less than {other} {words}.", change["hyla"], change[other]))
    return found


def _settings(study: Study) -> list[tuple[int, float]]:
    """The pairs of context length and held-out share that were run."""
    return list(dict.fromkeys((row["num_points"], row["held_out"]) for row in study.rows))
