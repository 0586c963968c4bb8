"""The lens's page: what it says first, and that nothing of a text or a model's name is taken for HTML."""

import copy

import pytest

from headcode.report.lens import _ranges, layer_sentences, lens_page
from headcode.report.lens_blocks import Heat, marked

ABOUT = {"classes": ["a", "b"], "pairs": 40, "example": ""}


def row(layer, question, skill, control, error=0.05):
    value = {"value": skill, "low": skill - error, "high": skill + error}
    ahead = {"value": skill - control, "low": skill - control - error, "high": skill - control + error}
    return {
        "layer": layer,
        "question": question,
        "skill": value,
        "controls": {"heads shuffled": control, "labels shuffled": 0.0},
        "ahead": {"heads shuffled": ahead, "labels shuffled": {**ahead, "value": skill}},
        "clear": ahead["low"] > 0,
    }


def study():
    spread = {"value": 2.0, "low": 1.5, "high": 2.5}
    layers = [
        {
            "layer": layer,
            "error": 1e-6,
            "relative_error": 3e-7,
            "reproduces": True,
            "dimension": dict.fromkeys(("codes", "unit", "unit shuffled", "unit untrained"), spread),
            "directions": 3,
            "norm": None,
            "rank": None,
            "from_kinds": {"word": 0.8, "special": 0.2},
            "strongest": [
                {
                    **{"text": 0, "query": 2, "key": 1, "size": 1.0, "share": 0.25},
                    "alike": [{"text": 1, "query": 0, "key": 0, "similarity": 0.987}],
                }
            ],
            "nearest": {"relative position": {"nearest": 0.4, "random": 0.1}},
        }
        for layer in (0, 1)
    ]
    moved = {"value": 0.01, "low": 0.005, "high": 0.015}
    return {
        "card": {
            **{"model": "<b>m", "heads": 4, "num_layers": 2, "passages": 9, "built_sentences": 0, "tolerance": 1e-5},
            **{"answer": "embedding", "questions": {"colour": ABOUT, "size": ABOUT}, "not_asked": {"taste": "no <i>"}},
        },
        "layers": layers,
        "unreadable": {"1": "it is <u>"},
        "separation": [
            row(0, "colour", 0.3, 0.28),
            row(0, "size", 0.6, 0.1),
            row(1, "colour", 0.9, 0.2),
            row(1, "size", 0.8, 0.1),
        ],
        "patching": {
            "rows": [
                {"layer": layer, "donor": donor, "moved": moved, "pairs": 3, **({} if first else {"more": moved})}
                for layer in (0, 1)
                for first, donor in ((True, "same structure"), (False, "heads dealt"))
            ],
            "unpatched": {"same structure": 0.5},
            "examples": {"recipient": ["<s>", "a"]},
            "median": {"same structure": 0.01, "heads dealt": 0.04},
        },
        "texts": [["<s>", "the", "<script>", "ran"], ["x", "y"]],
    }


def test_the_page_says_what_layers_separate_and_escapes_everything(tmp_path):
    text = lens_page(study(), "<em>.txt", tmp_path / "p.html", tmp_path).read_text(encoding="utf-8")
    assert "Are the codes structured? Yes: in 3 of 4 cells" in text and text.count("<details open>") == 1
    assert "Colour: layer 1, best in layer 1 (0.90 ± 0.05)." in text and "Size: layers 0 to 1" in text
    assert (
        "moves the output by 0.010 (median of 2 layers); the same numbers dealt to other heads move it by 0.040" in text
    )
    assert "Layer 1 cannot be read: it is &lt;u&gt;." in text and "Not asked: taste, because no &lt;i&gt;." in text
    assert "<small>(1.0 of the mean output, 25% of what this query is given)</small>" in text
    for tag in ("<b>", "<i>", "<script>", "<em>", "<s>", "<u>"):
        assert tag not in text
    assert 'src="http' not in text and "<script" not in text and "default-src 'none'" in text


def test_a_model_without_structure_is_said_to_have_none(tmp_path):
    result = copy.deepcopy(study())
    result["separation"] = [row(0, "colour", 0.3, 0.28), row(0, "size", 0.6, 0.58)]
    result["patching"] = {"rows": [], "why_not": "of a reason"}
    text = lens_page(result, "text.txt", tmp_path / "p.html", tmp_path).read_text(encoding="utf-8")
    assert "No: in none of 2 cells" in text and "Nothing was patched: of a reason." in text
    assert "Layer 0. Nothing that the controls do not tell as well." in text


def test_what_could_not_be_asked_is_said(tmp_path):
    result = copy.deepcopy(study())
    result["separation"], result["card"]["questions"] = [], {}
    text = lens_page(result, "text.txt", tmp_path / "p.html", tmp_path).read_text(encoding="utf-8")
    assert "No question could be asked" in text and "Not asked: taste, because no &lt;i&gt;." in text


def test_layers_in_sentences_say_what_is_new_what_goes_on_and_what_is_lost():
    rows = [row(3, "colour", 0.9, 0.2), row(3, "size", 0.5, 0.45), row(3, "taste", 0.7, -0.1)]
    rows += [row(4, "colour", 0.8, 0.2), row(4, "size", 0.6, 0.1), row(4, "taste", -0.02, -0.1)]
    rows += [row(5, "colour", 0.1, 0.2)]
    assert layer_sentences(rows) == [
        "Layer 3. Told: colour 0.90 ± 0.05 (best control 0.20, its highest), "
        "taste 0.70 ± 0.05 (best control 0.00, its highest).",
        "Layer 4. New: size 0.60 ± 0.05 (best control 0.10, its highest). Still: colour 0.80. "
        "No longer: taste −0.02 ± 0.05 (best control 0.00).",
        "Layer 5. No longer: colour 0.10 ± 0.05 (best control 0.20).",
    ]
    assert layer_sentences(rows[-1:]) == ["Layer 5. Nothing that the controls do not tell as well."]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([2], "layer 2"), ([0, 2], "layers 0 and 2"), ([0, 1, 3, 5, 6], "layers 0 to 1, 3 and 5 to 6")],
)
def test_layers_in_words(numbers, words):
    assert _ranges(numbers) == words


def test_tints_and_marks():
    cells = {"r": [(0.5, True)], "s": [(-0.25, False)], "t": [None]}
    text = Heat("x", ["a"], cells, "about", {"r": "<one>", "s": "two", "t": "three"}).html()
    assert '<td class="meaning">&lt;one&gt;</td>' in text
    assert 'color-mix(in srgb,var(--accent) 30%,transparent)">0.50<' in text
    assert '<td class="heat unclear">−0.25</td>' in text and '<td class="heat unclear">–</td>' in text
    assert marked(["Ġa", "b", "Ġc"], 2, 2) == 'ab <mark class="both">c</mark>'
    far = marked([f"w{i}" for i in range(40)], 0, 30)
    assert far.count(" … ") == 1 and far.endswith("w36 …") and "w15" not in far
