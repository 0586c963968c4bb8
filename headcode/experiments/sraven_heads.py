"""SRAVEN: how long a code has to be, that is, accuracy against the number of heads (Fig. 5C)."""

from typing import ClassVar

from headcode.experiments._logic import MAIN_METHODS
from headcode.experiments._sraven import SETTING_WORDS
from headcode.experiments._sraven_axis import AXIS_SELECTION, SRavenAxis, Values
from headcode.experiments.base import Study, Verdict, compare


class SRavenHeads(SRavenAxis):
    name = "sraven-heads"
    title = "SRAVEN: number of heads at fixed width"
    question = (
        "The code has one number per head. With qk_dim, v_dim and all else fixed, how long does it have to be for "
        "held-out combinations of rules?"
    )
    claim = "One head is clearly worse than several (Fig. 5C)."
    selection = (
        f"{AXIS_SELECTION} {SETTING_WORDS} One seed there (`--seeds 3` gives an interval), and softmax and HYLA alone: "
        "over one head `rms_head` leaves little more than the score's sign, which is no question of length, and "
        "softmax has no such norm."
    )
    field = "num_heads"
    label = "heads (all widths fixed)"
    values: ClassVar[Values] = {"smoke": (1, 4), "laptop": (1, 2, 4, 8, 16), "paper": (1, 2, 4, 8, 16)}
    methods: ClassVar[Values] = {"smoke": ("hyla",), "laptop": ("softmax", "hyla"), "paper": MAIN_METHODS}

    def verdicts(self, study: Study) -> list[Verdict]:
        """Each longer code against the shortest: to name the best one and test that would let the score choose."""
        found = []
        for method in self.methods[study.scale]:
            score = self.scores(study, method)
            fewest, *more = score
            for heads in more:
                statement = f"{method}: {heads} heads compose better than {fewest}."
                found.append(compare(statement, score[heads], score[fewest]))
        return found
