"""Whether the answer follows the code is said only where the donor predicts another answer than the puzzle's own."""

import numpy as np
import pytest

from headcode.explorer import donors, functions, inside, puzzles
from headcode.explorer.state import State
from headcode.tasks.sraven_rules import DISTRIBUTE
from tests.support.live import words_of

VERDICTS = ("The answer follows the code.", "The answer does not follow the code.", "Uninformative.")


def verdict(explorer, search, slot=0):
    """The one verdict of the page, and all that it says of the answer."""
    said = words_of(explorer.right(search, slot)[1])
    found = [words for words in VERDICTS if words in said]
    assert len(found) == 1, said
    return found[0], said


def puzzle_search(n, query, donor):
    return f"?model=zoo/sraven-2-hyla&n={n}&query={query}&layer=1&shown=1&donor={donor}"


@pytest.mark.parametrize(
    ("n", "query", "donor", "why"),
    [
        (0, 16, "rule-3", "which is the puzzle's own answer"),
        (0, 16, "rule-5", "which is the puzzle's own answer"),
        (18, 17, "n-19", "which is the puzzle's own answer"),
        (2, 17, "rule-3", "which is the model's answer without the patch"),
        (1, 16, "n-2", "distribute, gives is not determined by one row"),
    ],
)
def test_a_donor_that_predicts_nothing_else_is_uninformative(explorer, puzzler, n, query, donor, why):
    found, said = verdict(explorer, puzzle_search(n, query, donor))
    assert found == "Uninformative." and why in said
    assert "the donor's rule on this row gives" not in said  # no mark of what cannot be told
    puzzle = puzzles.sample(puzzler.task, "compositional", n)
    assert donor not in donors.offered(puzzler, State(model="m", split="compositional", n=n, query=query), puzzle)


def test_the_verdict_and_the_offers_agree_with_the_rules(explorer, puzzler):
    """Every rule as a donor of twelve puzzles, against the rule worked out on the last row by hand."""
    seen = set()
    for n in range(12):
        puzzle = puzzles.sample(puzzler.task, "compositional", n)
        before = inside.look(puzzler, puzzle.x).probabilities.argmax(1)
        for query in (16, 17):
            place = query - 16
            first, second = (int(puzzle.cells[2, c, puzzle.where(puzzle.feature(query))[c]]) for c in (0, 1))
            gives = [second, second + 1, second + 2, second - 1, second - 2, first + second, first - second]
            state = State(model="m", split="compositional", n=n, query=query)
            offers = donors.offered(puzzler, state, puzzle)
            for rule, value in enumerate(gives):
                telling = value % 8 not in (puzzle.answer[place], before[place])
                found, _ = verdict(explorer, puzzle_search(n, query, f"rule-{rule}"))
                assert (found != "Uninformative.") == telling == (f"rule-{rule}" in offers), (n, query, rule)
                seen.add(found)
            instances = [int(each[2:]) for each in offers if each.startswith("n-")]
            assert len(instances) == 3 and n < min(instances) <= max(instances) <= n + donors.SEARCHED
            for other in instances:
                rule = puzzles.sample(puzzler.task, "compositional", other).rule(query)
                assert rule != DISTRIBUTE and gives[rule] % 8 not in (puzzle.answer[place], before[place])
    assert seen == set(VERDICTS)


def test_the_menu_has_the_offers_and_the_donor_of_the_address(explorer, puzzler):
    def listed(donor):
        patch = explorer.left(puzzle_search(0, 16, donor))[6]
        links = patch[1].children[1].children[1].children
        return [explorer.read(link.href)[0].donor for link in links]

    puzzle = puzzles.sample(puzzler.task, "compositional", 0)
    offers = donors.offered(puzzler, State(model="m", split="compositional", n=0, query=16), puzzle)
    assert "rule-0" in offers and "rule-3" not in offers
    assert listed("rule-0") == ["", *offers]
    assert listed("rule-3") == ["", *offers, "rule-3"]


def test_a_puzzle_with_cells_set_by_hand_is_compared_with_the_model_s_answer(explorer, puzzler):
    state = State(model="zoo/sraven-2-hyla", split="compositional", n=0, query=16, edits=((0, 1), (2, 5)), layer=1)
    puzzle = puzzles.puzzle_of(puzzler.task, state)
    assert puzzle.edited
    before = int(inside.look(puzzler, puzzle.x).probabilities.argmax(1)[0])
    found = {}
    for rule in range(7):
        shown = state.change(donor=f"rule-{rule}", shown=True)
        _, value = puzzles.expected(puzzle, puzzles.donor_of(puzzle, shown)[0], 16)
        found[rule] = verdict(explorer, shown.search())[0] == "Uninformative."
        assert found[rule] == (value == before)
    assert [f"rule-{rule}" in donors.offered(puzzler, state, puzzle) for rule in found] == [
        not f for f in found.values()
    ]


def test_functions_that_are_alike_at_the_hidden_point_are_uninformative(explorer, logician):
    task, kinds = logician.task, set()
    compositions = task.compositions[task.split_compositions["compositional"]].tolist()
    for n in range(6):
        state = State(model="zoo/logic-hyla", split="compositional", n=n, query=31, key=31, layer=1, shown=True)
        function = functions.function_of(task, state)
        said = float(inside.look(logician, function.x).output[0, 0])
        truth = float(function.values[-1])
        offers = donors.offered(logician, state, function)
        for terms in compositions:
            donor = f"terms-{terms[0]}.{terms[1]}"
            there = float(task.evaluate(task.term_bits(np.array(terms)), function.inputs[-1:], task.t_norm)[0])
            telling = abs(there - truth) >= 0.1 and abs(said - there) >= abs(said - truth)
            assert (donor in offers) == telling
            if n == 0:
                words = words_of(explorer.right(state.link(donor=donor), 0)[1])
                assert ("Uninformative." in words) == (not telling)
                assert (", nearer to" in words) == telling
            kinds.add(telling)
    assert kinds == {False, True}
