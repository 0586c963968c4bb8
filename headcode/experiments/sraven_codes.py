"""SRAVEN: which rule governs a feature, read from the codes of the answer slots."""

from headcode.experiments._codes import CodesExperiment
from headcode.experiments._logic import MAIN_METHODS
from headcode.experiments._sraven import (
    PAPER_INSTANCES,
    PAPER_WARMUPS,
    SELECTION,
    SETTING_WORDS,
    main_seeds,
    searched,
    select,
    sraven_base,
    with_instances,
)
from headcode.experiments.base import NamedConfigs, Row, Scale, Study

PAPER_DEPTHS = (4, 16)
"""Of Figs. A6 and A7."""


class SRavenCodes(CodesExperiment):
    name = "sraven-codes"
    title = "SRAVEN: the rules, decoded from the codes"
    question = (
        "Can the rule behind an answer slot be read from the codes of that slot, also in combinations of rules that "
        "were never seen in training, in which layers, and which rules share a code?"
    )
    claim = (
        "The latent code predicts the rule, also on held-out compositions, best in late layers (Fig. 5F); codes of a "
        "rule form clusters that unseen compositions share (5A, A6, A7), early layers show the target's magnitude "
        "(5B); sum and difference share a code (5E, A8)."
    )
    selection = (
        f"{SELECTION} {SETTING_WORDS} Codes are taken in two ways: ours, of every answer slot to itself on permuted "
        "puzzles, and the authors', of the last slot to its own feature in the other panels of its row, on puzzles "
        "without permutations. At paper scale the models of 4 and of 16 layers from Fig. 4's longest runs are read "
        "(which runs the paper reads is not known to us)."
    )
    parts = "rules"
    colour = "rule"
    ways = ("ours", "authors")
    shared = ("sum", "difference")
    early_colour = "target"

    def runs(self, scale: Scale) -> NamedConfigs:
        methods = ("softmax", "hyla") if scale == "smoke" else MAIN_METHODS
        base = sraven_base(scale)
        if scale != "paper":
            yield from searched(base, scale, seed=main_seeds(scale), method=methods)
            return
        longest = with_instances(base, max(PAPER_INSTANCES))
        yield from searched(longest, scale, warmups=PAPER_WARMUPS, num_layers=PAPER_DEPTHS, method=methods)

    def chosen_rows(self, study: Study) -> list[Row]:
        return select(study, ("method", "num_layers"))
