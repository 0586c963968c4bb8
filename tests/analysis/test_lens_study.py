"""What the lens concludes: on codes whose structure is planted, and on small random models, where there is none."""

import collections

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from headcode.analysis import open_model, study_model  # noqa: E402
from headcode.analysis.lens.collect import Pairs, _moments, dimension, directions  # noqa: E402
from headcode.analysis.lens.neighbours import agreement, strongest_pairs  # noqa: E402
from headcode.analysis.lens.patching import HEADS_DEALT, patch_layers  # noqa: E402
from headcode.analysis.lens.questions import OFFSETS, PLACES, Question, _offsets, _places, ask_of_passages, passages  # noqa: E402
from headcode.analysis.lens.reading import Text  # noqa: E402
from headcode.analysis.lens.sentences import RELATIONS, build, last_tokens  # noqa: E402
from headcode.analysis.lens.separation import separation  # noqa: E402
from tests.support.lens import TEXT, save_word_model  # noqa: E402


def question(count=210, classes=3):
    numbers = np.arange(count)
    return Question("q", list("abc")[:classes], numbers, numbers, numbers, numbers % classes, numbers // 10)


def judged(codes, before=None):
    rng = np.random.default_rng(5)
    before = rng.normal(size=codes.shape) if before is None else before
    (row,) = separation({"trained": {0: {"q": codes}}, "untrained": {0: {"q": before}}}, [question()], 0)
    return row


def test_classes_that_differ_in_which_head_is_large_are_told_clearly():
    asked = question()
    rng = np.random.default_rng(0)
    codes = np.abs(rng.normal(size=(210, 5))) * 0.05
    codes[np.arange(210), asked.label] += 1
    row = judged(codes)
    assert row["skill"]["value"] == 1 and row["clear"]
    assert abs(row["controls"]["heads shuffled"]) < 0.2 and abs(row["controls"]["labels shuffled"]) < 0.1
    assert row["skill"]["low"] < 1, "an interval of width 0 would claim that no error is possible"


def test_classes_that_differ_in_size_alone_are_no_structure():
    """Heads shuffled knows sizes just as well."""
    codes = np.random.default_rng(0).uniform(0.9, 1.1, (210, 5)) * (1 + 3 * question().label[:, None])
    row = judged(codes)
    assert row["skill"]["value"] > 0.95 and row["controls"]["heads shuffled"] > 0.95 and not row["clear"]


def test_what_untrained_codes_tell_as_well_is_no_finding():
    codes = np.eye(5)[question().label] + 0.1 * np.random.default_rng(0).normal(size=(210, 5))
    row = judged(codes, before=codes * 1e-6)  # the decoder does not mind the scale
    assert row["controls"]["untrained"] == row["skill"]["value"] and not row["clear"]


def test_noise_is_told_by_nothing():
    row = judged(np.random.default_rng(1).normal(size=(210, 5)))
    assert abs(row["skill"]["value"]) < 0.15 and not row["clear"]


def test_dimension_of_codes():
    """(Σλ)² / Σλ²: variances 1, 1 and 2 in three of four directions are 16 / 6."""
    signs = np.array([[a, b, c] for a in (-1, 1) for b in (-1, 1) for c in (-1, 1)], float)
    codes = np.concatenate([signs * [1, 1, 2**0.5], np.full((8, 1), 7.0)], 1)
    moments = [_moments(codes)] * 3
    assert dimension(moments, 2, 0) == pytest.approx({"value": 16 / 6, "low": 16 / 6, "high": 16 / 6})
    assert directions(moments, 0.5) == 1 and directions(moments, 0.75) == 2 and directions(moments) == 3


@pytest.mark.parametrize("relation", RELATIONS)
def test_minimal_pairs(relation):
    built = build(relation, 7)
    for related, unrelated in zip(built[::2], built[1::2], strict=True):
        assert related.related and not unrelated.related and related.group == unrelated.group
        assert (related.query, related.key, len(related.words)) == (
            unrelated.query,
            unrelated.key,
            len(unrelated.words),
        )
        pairs = [(s.words[s.query], s.words[s.key]) for s in (related, unrelated)]
        assert (pairs[0] == pairs[1]) == (relation != "same word")
        if relation in ("subject", "bracket"):
            assert collections.Counter(related.words) == collections.Counter(unrelated.words)
    assert len({sentence.words for sentence in built}) > 10


def test_words_end_where_their_last_token_is(tmp_path):
    model = open_model(save_word_model(tmp_path))
    ids, ends = last_tokens(model, ("the", "dog", "slept", "."))
    assert ids == [1, *model.encode("the dog slept .", special=False), 2] and ends == [1, 2, 3, 4]


def test_offsets_and_places():
    named = np.array(OFFSETS)[_offsets(5)]
    assert named[2].tolist() == ["2–3 before", "1 before", "itself", "1 after", "2–3 after"]
    assert named[4, 0] == "further before" and named[0, 4] == "further after"
    names = ["[CLS]", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2"]
    places = np.array(PLACES)[_places(Text([], names, ["special", *["patch"] * 6]))]
    assert places[1].tolist() == [
        "class token",
        "itself",
        "beside",
        "same row",
        "above or below",
        "elsewhere",
        "elsewhere",
    ]


def test_a_causal_model_is_asked_about_the_past_alone():
    texts = [Text([0] * 9, ["a"] * 9, ["word"] * 9)] * 12
    (asked,), reasons = ask_of_passages(texts, causal=True, seed=0)
    assert asked.classes == ["itself", "1 before", "2–3 before", "further before"] and (asked.key <= asked.query).all()
    assert set(reasons) == {"kind of the key", "kind of the query"}


def test_lines_are_sentences_where_no_full_stops_divide_them():
    lines = [f"line {i} has five words" for i in range(10_000)]
    assert passages("\n".join(lines), 3) == [lines[0], lines[5000], lines[-1]]
    wrapped = "one sentence over\ntwo lines. " * 40
    assert passages(wrapped, 99) == ["one sentence over two lines."] * 40


def test_strongest_pairs_and_their_like():
    texts = [Text([], ["the", "cat", "ran"], ["function word", "word", "word"])] * 4
    codes = np.array([[1, 0], [0.9, 0.1], [0, 1], [0.1, 1]], float)
    numbers = np.arange(4)
    pairs = Pairs(numbers, np.array([1, 1, 2, 2]), np.zeros(4, int), np.array([4.0, 3, 2, 1]), np.ones(4) / 2, codes)
    first, second = strongest_pairs(pairs, texts)
    assert (first["text"], first["query"], first["key"], first["size"], first["share"]) == (0, 1, 0, 4, 0.5)
    assert [near["text"] for near in first["alike"]] == [1, 3, 2]
    assert first["alike"][0]["similarity"] == pytest.approx(0.9 / 0.82**0.5)
    assert (second["text"], second["query"]) == (2, 2)  # cat → the of another text is the same pair of words
    assert agreement(pairs, texts, 0)["relative position"]["nearest"] == 1


def test_patching_with_equal_sentences_moves_nothing(tmp_path):
    model = open_model(save_word_model(tmp_path))
    ids = [model.encode(f"the {noun} saw the king .") for noun in ("dog", "cat", "girl")]
    rows = patch_layers(model, ids, {"own": ids, "other": [*ids[1:], ids[0]]}, 2, 0)
    assert [(row["layer"], row["donor"]) for row in rows] == [
        (layer, donor) for layer in (0, 1) for donor in ("own", "other", HEADS_DEALT)
    ]
    for own, other, dealt in (rows[:3], rows[3:]):
        assert own["moved"] == {"value": 0, "low": 0, "high": 0}
        assert min(other["moved"]["value"], dealt["moved"]["value"]) > 1e-10
        assert other["more"]["value"] == pytest.approx(other["moved"]["value"] - own["moved"]["value"])


def test_a_study_of_a_random_model(tmp_path):
    result = study_model(save_word_model(tmp_path), TEXT, built=12, patched=3)
    card = result["card"]
    assert (card["passages"], card["built_sentences"], card["heads"]) == (9, 96, 6)
    assert set(card["questions"]) >= {"relative position", *RELATIONS.values()}
    assert len(result["separation"]) == 2 * len(card["questions"]) and card["comparisons"] == 6 * len(card["questions"])
    assert [layer["reproduces"] for layer in result["layers"]] == [True, True]
    for layer in result["layers"]:
        assert sum(layer["from_kinds"].values()) == pytest.approx(1)
        assert 1 <= layer["dimension"]["codes"]["value"] <= 6 and 1 <= layer["directions"] <= 6
    assert len(result["patching"]["rows"]) == 2 * 3 and result["patching"]["unpatched"]["same structure"] > 0
    again = study_model(save_word_model(tmp_path), TEXT, built=12, patched=3)
    assert again == result, "a study is a function of its arguments"


def test_a_study_of_images(tmp_path):
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=6, intermediate_size=16, image_size=12, patch_size=4
    )
    transformers.ViTModel(config).save_pretrained(tmp_path)
    result = study_model(tmp_path, torch.randn(9, 3, 12, 12), patched=4)
    assert list(result["card"]["questions"]) == ["relative place"]
    assert {row["donor"] for row in result["patching"]["rows"]} == {"other image", HEADS_DEALT}
    assert all(layer["relative_error"] < 1e-5 for layer in result["layers"])
    with pytest.raises(ValueError, match="sees images, and texts were given"):
        study_model(tmp_path, "a text")
    with pytest.raises(ValueError, match=r"must be \(3, 12, 12\), got \(3, 8, 8\)"):
        study_model(tmp_path, torch.randn(2, 3, 8, 8))


def test_a_study_of_token_ids(tmp_path):
    ids = np.random.default_rng(0).integers(3, 50, (9, 11)).tolist()
    result = study_model(save_word_model(tmp_path, "gpt2"), ids, built=0, patched=2)
    assert result["texts"][3] == [str(i) for i in ids[3]], "ids need no tokenizer"
    with pytest.raises(ValueError, match="at least one text"):
        study_model(tmp_path, [])
    with pytest.raises(ValueError, match="max_texts must be at least 1"):
        study_model(tmp_path, TEXT, max_texts=0)
