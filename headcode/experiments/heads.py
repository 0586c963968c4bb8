"""Number of heads at fixed width: the code's length, all sizes of the model unchanged."""

from pathlib import Path

from headcode.experiments._drawing import colour_of, limits, line
from headcode.experiments._logic import at_one_rate, seeds_of
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict, compare
from headcode.experiments.mean import per_seed
from headcode.report.style import COLUMN_WIDTH, canvas, save
from headcode.sweep import grid

SPLITS = ("iid", "compositional", "novel")


class Heads(Experiment):
    name = "heads"
    title = "Number of heads at fixed width"
    question = (
        "The code has one number per head. With qk_dim, v_dim and all else fixed, how does its length change "
        "generalisation?"
    )
    claim = "On SRAVEN, one head is clearly worse than several. (This experiment is on fuzzy logic.)"
    selection = "Learning rate 3e-3, decay 0.1, last checkpoint; nothing is chosen by a score."

    def runs(self, scale: Scale) -> NamedConfigs:
        base = at_one_rate(scale, num_points=16, steps=3000)
        methods = ("hyla",) if scale == "laptop" else ("softmax", "hyla")
        heads = (1, 4) if scale == "smoke" else (1, 2, 4, 8, 16)
        yield from grid(base, seed=seeds_of(scale), num_heads=heads, method=methods)

    def tables(self, study: Study) -> list[Table]:
        rows: list[Row] = []
        for method in study.values("method"):
            for heads in sorted(study.values("num_heads")):
                where = {"method": method, "num_heads": heads}
                scores = {split: study.mean(f"{split}/r2", **where) for split in SPLITS}
                rows.append({"method": method, "heads": heads, **scores})
        return [Table("R², mean and 95 % interval over seeds", rows)]

    def verdicts(self, study: Study) -> list[Verdict]:
        """Each longer code against the shortest: to name the best one and test that would let the score choose."""
        fewest, *more = sorted(study.values("num_heads"))
        found = []
        for method in study.values("method"):
            score = {h: per_seed(study.rows, "compositional/r2", method=method, num_heads=h) for h in (fewest, *more)}
            for heads in more:
                statement = f"{method}: a code of {heads} numbers generalises better than a code of {fewest}."
                found.append(compare(statement, score[heads], score[fewest]))
        return found

    def draw(self, study: Study, stem: Path) -> list[Path]:
        heads, methods = sorted(study.values("num_heads")), study.values("method")
        with canvas(COLUMN_WIDTH, 2.7) as (figure, axes):
            everything = []
            for place, method in enumerate(methods):
                for shift, split, style in ((-1.5, "compositional", "-"), (1.5, "iid", ":")):
                    means = [study.mean(f"{split}/r2", method=method, num_heads=h) for h in heads]
                    everything += means
                    label = f"{method}, {'held out' if split == 'compositional' else 'seen'}"
                    aside = shift + 6.0 * (place - (len(methods) - 1) / 2)
                    line(axes, heads, means, colour_of(method, methods), label, style, shift=aside)
            axes.set_xscale("log", base=2)
            axes.margins(x=0.08)
            axes.set_xticks(heads, [str(h) for h in heads])
            axes.minorticks_off()
            axes.set(xlabel="heads (all widths fixed)", ylabel="R²")
            limits(axes, everything)
            figure.legend(loc="outside lower center", ncols=2)
            return save(figure, stem)
