"""SRAVEN: how hard puzzles become with the number of features (Fig. 5D)."""

from typing import ClassVar

from headcode.experiments._logic import MAIN_METHODS
from headcode.experiments._sraven import SETTING_WORDS
from headcode.experiments._sraven_axis import AXIS_SELECTION, SRavenAxis, Values
from headcode.experiments.base import Study, Verdict, compare


class SRavenFeatures(SRavenAxis):
    name = "sraven-features"
    title = "SRAVEN: number of features"
    question = (
        "How does accuracy on held-out combinations of rules fall when puzzles have more features, each hidden behind "
        "the columns' permutations?"
    )
    claim = "The number of features K sets the difficulty of the task (Fig. 5D). Which K it shows is not known to us."
    selection = (
        f"{AXIS_SELECTION} {SETTING_WORDS} One seed there, and 2, 3 and 4 features with equally many steps, in which "
        "puzzles of 4 features are hardly learned: the scores say how far training comes, not where it would end. (One "
        "feature alone has no combinations of rules to hold out.)"
    )
    field = "num_features"
    label = "features K"
    values: ClassVar[Values] = {"smoke": (2, 3), "laptop": (2, 3, 4), "paper": (2, 3, 4, 5)}
    methods: ClassVar[Values] = {"smoke": ("hyla",), "laptop": MAIN_METHODS, "paper": MAIN_METHODS}

    def verdicts(self, study: Study) -> list[Verdict]:
        score = {method: self.scores(study, method) for method in self.methods[study.scale]}
        found = []
        for method, by_features in score.items():
            fewest, *more = by_features
            for features in more:
                statement = f"{method}: puzzles of {features} features are harder than those of {fewest}."
                found.append(compare(statement, by_features[fewest], by_features[features]))
        for other in ("softmax", "linear"):
            if other in score and "hyla" in score:
                for features in score["hyla"]:
                    statement = f"HYLA is ahead of {other} with {features} features."
                    found.append(compare(statement, score["hyla"][features], score[other][features]))
        return found
