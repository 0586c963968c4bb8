"""Fuzzy logic: which terms make up the function, read from the codes."""

from headcode.experiments._codes import CodesExperiment
from headcode.experiments._logic import MAIN_METHODS, SELECTION, logic_base, paper_search, seeds_of, select
from headcode.experiments.base import NamedConfigs, Row, Scale, Study
from headcode.sweep import grid


class LogicCodes(CodesExperiment):
    name = "logic-codes"
    title = "Fuzzy logic: the function's terms, decoded from the codes"
    question = (
        "Can the terms of a function be read from the code of the answering token to itself, also when their "
        "combination was never seen in training? (One query point for all functions, contexts vary.)"
    )
    claim = "The latent code says which terms the function has, and decoders carry over to held-out compositions."
    selection = SELECTION
    parts = "terms"
    colour = "term"
    inputs = "fixed_query"

    def runs(self, scale: Scale) -> NamedConfigs:
        if scale == "smoke":  # twelve decoders for every source take their time
            yield from grid(logic_base(scale), seed=(0,), method=("hyla",))
            return
        yield from grid(logic_base(scale), seed=seeds_of(scale), method=MAIN_METHODS, **paper_search(scale))

    def chosen_rows(self, study: Study) -> list[Row]:
        return select(study, ("method",))
