"""SRAVEN: which rule governs a feature, read from the codes of the answer slots."""

from headcode.experiments._codes import CodesExperiment
from headcode.experiments._logic import MAIN_METHODS
from headcode.experiments._sraven import SELECTION, SETTING_WORDS, main_seeds, searched, select, sraven_base
from headcode.experiments.base import NamedConfigs, Row, Scale, Study


class SRavenCodes(CodesExperiment):
    name = "sraven-codes"
    title = "SRAVEN: the rules, decoded from the codes"
    question = (
        "Can the rule behind an answer slot be read from the code of that slot to itself, also in combinations of "
        "rules that were never seen in training?"
    )
    claim = (
        "The latent code predicts the rule, also on held-out compositions; in HYLA the codes of a rule form clusters "
        "that unseen compositions share."
    )
    selection = f"{SELECTION} {SETTING_WORDS}"
    parts = "rules"
    colour = "rule"

    def runs(self, scale: Scale) -> NamedConfigs:
        methods = ("softmax", "hyla") if scale == "smoke" else MAIN_METHODS
        yield from searched(sraven_base(scale), scale, seed=main_seeds(scale), method=methods)

    def chosen_rows(self, study: Study) -> list[Row]:
        return select(study, ("method",))
