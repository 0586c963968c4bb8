"""SRAVEN: accuracy against the share of rule combinations that training never sees (Fig. A5)."""

from typing import Any, ClassVar

from headcode.experiments._logic import MAIN_METHODS
from headcode.experiments._sraven import SETTING_WORDS
from headcode.experiments._sraven_axis import AXIS_SELECTION, SRavenAxis, Values
from headcode.experiments.base import Study, Verdict, compare


class SRavenHeldOut(SRavenAxis):
    name = "sraven-held-out"
    title = "SRAVEN: share of combinations held out"
    question = "How few of the rules' combinations have to be in training, so that the others are solved as well?"
    claim = (
        "The paper shows accuracy for shares from 0.1 to 0.9 (Fig. A5); the values between are not known to us, nor "
        "a statement in numbers."
    )
    selection = (
        f"{AXIS_SELECTION} {SETTING_WORDS} One seed there, and 36 pairs of rules, of which 27 to 6 are in training: "
        "a tenth of them, held out or in training, would hardly have all eight rules. A seed does not hold out the "
        "same combinations at two shares."
    )
    field = "held_out"
    label = "combinations held out"
    values: ClassVar[Values] = {
        "smoke": (0.25, 0.5),
        "laptop": (0.25, 0.4, 0.55, 0.7, 0.85),
        "paper": (0.1, 0.3, 0.5, 0.7, 0.9),
    }
    methods: ClassVar[Values] = {"smoke": ("hyla",), "laptop": MAIN_METHODS, "paper": MAIN_METHODS}

    def shown(self, value: Any) -> str:
        return f"{value:.0%}"

    def verdicts(self, study: Study) -> list[Verdict]:
        score = {method: self.scores(study, method) for method in self.methods[study.scale]}
        found = []
        for method, by_share in score.items():
            least, most = min(by_share), max(by_share)
            if least < most:
                statement = f"{method}: it composes better with {least:.0%} held out than with {most:.0%}."
                found.append(compare(statement, by_share[least], by_share[most]))
        for other in ("softmax", "linear"):
            if other in score and "hyla" in score:
                for share in score["hyla"]:
                    statement = f"HYLA is ahead of {other} with {share:.0%} held out."
                    found.append(compare(statement, score["hyla"][share], score[other][share]))
        return found
