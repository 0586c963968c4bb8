"""SCAN: commands in words, on the published splits, by an encoder-decoder of softmax, linear or HYLA layers."""

from pathlib import Path

from headcode.experiments._drawing import bars, limits
from headcode.experiments._logic import MAIN_METHODS, seeds_of
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict, compare
from headcode.experiments.mean import Mean, judge, per_seed
from headcode.presets import preset
from headcode.report.style import METHOD_COLOURS, PAGE_WIDTH, canvas, save
from headcode.run import override
from headcode.sweep import grid
from headcode.tasks.scan_grammar import SPLITS

METRIC = "exact_match"
SOLVED = 0.95


class ScanSplits(Experiment):
    name = "scan"
    title = "SCAN: commands in words"
    question = (
        "An encoder-decoder reads a command and writes its actions. Which of softmax, linear and HYLA layers, at equal "
        "parameters, carries over to commands that the published splits hold out?"
    )
    claim = (
        "Not in the paper, at any scale; its discussion names semantic parsing as where composition was seen to come "
        "with scale."
    )
    selection = (
        "One learning rate and decay for all, tuned by hand on the split simple with HYLA alone, which may favour it; "
        "last checkpoint; nothing else is chosen by a score."
    )

    def runs(self, scale: Scale) -> NamedConfigs:
        base = preset("scan-long" if scale == "paper" else "scan")
        splits: tuple[str, ...] = SPLITS
        if scale == "smoke":
            sizes = {"dim": 16, "num_heads": 2, "qk_dim": 8, "v_dim": 8, "mlp_dim": 16, "decoder_layers": 1}
            every = {"log_every": 2, "eval_every": 4, "eval_size": 64, "checkpoint_every": 0}
            base = override(base, **sizes, num_layers=1, steps=8, batch_size=8, **every)
            splits = ("simple", "jump")
        yield from grid(base, seed=seeds_of(scale), scan_split=splits, method=MAIN_METHODS)

    def tables(self, study: Study) -> list[Table]:
        rows: list[Row] = []
        for split in study.values("scan_split"):
            for method in MAIN_METHODS:
                where = {"scan_split": split, "method": method}
                held_out = study.mean(f"compositional/{METRIC}", **where)
                rows.append(
                    {
                        "split": split,
                        "method": method,
                        "held out": held_out,
                        "seed by seed": ", ".join(f"{value:.3f}" for value in held_out.each),
                        "tokens of held-out commands": study.mean("compositional/token_accuracy", **where),
                        "training commands": study.mean(f"iid/{METRIC}", **where),
                    }
                )
        return [Table("Commands with every action right, mean and 95 % interval over seeds", rows)]

    def verdicts(self, study: Study) -> list[Verdict]:
        found = []
        for split in study.values("scan_split"):
            score = {
                m: per_seed(study.rows, f"compositional/{METRIC}", method=m, scan_split=split) for m in MAIN_METHODS
            }
            if split == "simple":
                found += [_solves(method, Mean.of(score[method].values())) for method in MAIN_METHODS]
            for other in ("softmax", "linear"):
                found.append(compare(f"{split}: HYLA is ahead of {other}.", score["hyla"], score[other]))
        return found

    def draw(self, study: Study, stem: Path) -> list[Path]:
        splits = study.values("scan_split")
        groups = {
            method: [study.mean(f"compositional/{METRIC}", method=method, scan_split=split) for split in splits]
            for method in MAIN_METHODS
        }
        with canvas(PAGE_WIDTH, 2.7) as (figure, axes):
            bars(axes, groups, [split.replace("_", " ") for split in splits], METHOD_COLOURS)
            axes.set_ylabel("held-out commands, exact match")
            limits(axes, [mean for means in groups.values() for mean in means])
            figure.legend(loc="outside lower center", ncols=3)
            return save(figure, stem)


def _solves(method: str, mean: Mean) -> Verdict:
    statement = f"simple: {method} carries out {SOLVED:.0%} of held-out commands or more."
    return Verdict(statement, judge(mean, SOLVED), f"{mean}, against {SOLVED}")
