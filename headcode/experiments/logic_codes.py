"""Fuzzy logic: which terms make up the function, read from the codes."""

from headcode.experiments._codes import CodesExperiment
from headcode.experiments._logic import MAIN_METHODS, logic_base, seeds_of
from headcode.experiments.base import NamedConfigs, Scale
from headcode.run import override
from headcode.sweep import grid


class LogicCodes(CodesExperiment):
    name = "logic-codes"
    title = "Fuzzy logic: the function's terms, decoded from the codes"
    question = (
        "Can the terms of a function be read from the code of the answering token to itself, also when their "
        "combination was never seen in training? (One query point for all functions, contexts vary.)"
    )
    claim = (
        "The latent code says which terms the function has, and decoders carry over to held-out compositions "
        "(Fig. 2B, D, A2; N=96, 50 % held out)."
    )
    selection = (
        "One learning rate and decay for all: at paper scale those of the authors' runs whose codes they read (1e-3, "
        "0.1; N=96, 50 % held out; they have one seed, we have three), at laptop scale 3e-3 and 0.1 (N=32, 70 % held "
        "out). The last checkpoint counts. Nothing is chosen by a score."
    )
    parts = "terms"
    colour = "term"
    ways = ("authors",)  # ours is the same: the answering token's code to itself, with one query point

    def runs(self, scale: Scale) -> NamedConfigs:
        if scale == "smoke":  # twelve decoders for every source take their time
            yield from grid(logic_base(scale), seed=(0,), method=("hyla",))
            return
        base = override(logic_base(scale), num_points=96, held_out=0.5) if scale == "paper" else logic_base(scale)
        yield from grid(base, seed=seeds_of(scale), method=MAIN_METHODS)
