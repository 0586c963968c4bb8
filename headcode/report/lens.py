"""The lens's page: what a model's codes separate, in plain words first, then every number behind them.

lens_page(study_model("all-minilm-folder", text), "text.txt", "lens.html", pictures)
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headcode.report.figures import lens_patching
from headcode.report.lens_blocks import Heat, MarkedPairs, word_of
from headcode.report.page import Block, Figure, Folded, Heading, Page, Points, Table, Text

WORTH_TELLING = 0.1
"""How far ahead of the best control a layer must be for the summary to tell of it."""
_PAIRS_NAMED = 3


def lens_page(result: Mapping[str, Any], source: str, out: str | Path, pictures: Path) -> Path:
    """Write the page about a study; `source` says where its text is from, `pictures` is a folder for figures."""
    card = result["card"]
    images = "relative place" in {*card["questions"], *card["not_asked"]}
    what = "images" if images else "sentences"
    page = Page(
        f"{card['model']} under the lens",
        f"{card['num_layers']} layers of {card['heads']} heads, read on {card['passages']} {what} ({source}) and "
        f"{card['built_sentences']} built ones. In a layer, the attention weights of a pair of tokens across the heads "
        f"are its code: {card['heads']} numbers that configure the small network through which the one token adds to "
        f"the other. Layers are counted from 0.",
    )
    page.section("In a minute", *_summary(result))
    if result["separation"]:
        page.section("What codes separate", *_separation(result))
    page.section("Strongest pairs, and codes like theirs", *_pairs(result))
    page.section("Dimension and rank", *_dimension(result))
    page.section("Codes from another sentence", *_patching(result, pictures))
    page.section("The check", *_check(result))
    return page.write(out)


def margin(row: Mapping[str, Any]) -> float:
    """How far the codes are ahead of the best control."""
    return min(each["value"] for each in row["ahead"].values())


def is_told(row: Mapping[str, Any]) -> bool:
    return row["clear"] and margin(row) >= WORTH_TELLING


def plus_minus(value: Mapping[str, float], digits: int = 2) -> str:
    return f"{value['value']:.{digits}f} ± {value['high'] - value['value']:.{digits}f}".replace("-", "−")


def layer_sentences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each layer's codes separate, in words: what is new there, what goes on, and what a control tells as well."""
    highest: dict[str, Mapping[str, Any]] = {}
    for row in filter(is_told, rows):
        found = highest.setdefault(row["question"], row)
        highest[row["question"]] = max(found, row, key=lambda each: each["skill"]["value"])
    if len({row["layer"] for row in rows}) == 1:
        highest = {}  # nothing to compare with
    sentences: list[str] = []
    before: list[str] = []
    for layer in dict.fromkeys(row["layer"] for row in rows):
        mine = [row for row in rows if row["layer"] == layer]
        told = sorted((row for row in mine if is_told(row)), key=margin, reverse=True)
        words = {
            "New" if sentences else "Told": [row for row in told if row["question"] not in before],
            "Still": [row for row in told if row["question"] in before],
            "No longer": [row for row in mine if row["question"] in before and not is_told(row)],
        }
        parts = []
        for word, each in words.items():
            named = [_in_words(row, word != "Still", row is highest.get(row["question"])) for row in each]
            parts += [f"{word}: {', '.join(named)}."] if named else []
        sentences.append(f"Layer {layer}. " + (" ".join(parts) or "Nothing that the controls do not tell as well."))
        before = [row["question"] for row in told]
    return sentences


def _in_words(row: Mapping[str, Any], in_full: bool, is_highest: bool) -> str:
    best = f"best control {max(row['controls'].values()):.2f}".replace("-", "−")
    notes = [*([best] if in_full else []), *(["its highest"] if is_highest else [])]
    skill = plus_minus(row["skill"]) if in_full else f"{row['skill']['value']:.2f}".replace("-", "−")
    return f"{row['question']} {skill}" + (f" ({', '.join(notes)})" if notes else "")


def not_asked(card: Mapping[str, Any]) -> list[str]:
    return [f"Not asked: {name}, because {why}." for name, why in card["not_asked"].items()]


def _summary(result: Mapping[str, Any]) -> list[Block]:
    rows = result["separation"]
    known = [*_told_by_patching(result), _told_by_check(result)]
    if not rows:
        return [Text("No question could be asked of the codes."), Points([*not_asked(result["card"]), *known])]
    return [
        Text(_verdict(rows)),
        _heat(result),
        Text(
            f"Skill on sentences that the decoder has not seen: 0 is guessing, 1 is always right. Blue: clearly ahead "
            f"of all three controls, by {WORTH_TELLING} or more. Grey: not clearly ahead."
        ),
        Heading("Layer by layer"),
        Points(layer_sentences(rows)),
        Heading("Are the codes used?"),
        Points(known),
    ]


def _heat(result: Mapping[str, Any]) -> Heat:
    rows = result["separation"]
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    found = {(row["question"], row["layer"]): (row["skill"]["value"], is_told(row)) for row in rows}
    questions = result["card"]["questions"]
    cells = {name: [found.get((name, layer)) for layer in layers] for name in questions}
    meanings = {name: about["example"] or ", ".join(about["classes"]) for name, about in questions.items()}
    return Heat("skill, by layer", [str(layer) for layer in layers], cells, "classes of pairs", meanings)


def _verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    told = [row for row in rows if is_told(row)]
    if not told:
        return f"No: in none of {len(rows)} cells do a layer's codes tell more than every control."
    return (
        f"Are the codes structured? {'Yes' if 2 * len(told) > len(rows) else 'In part'}: in {len(told)} of "
        f"{len(rows)} cells a layer's codes tell the classes of pairs apart, clearly better than the controls do: "
        f"the same numbers dealt to other heads, the same model untrained, and shuffled labels."
    )


def _by_question(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where in the depth each question is answered."""
    sentences = []
    for question in dict.fromkeys(row["question"] for row in rows):
        mine = [row for row in rows if row["question"] == question]
        told = [row for row in mine if is_told(row)]
        if not told:
            sentences.append(f"{question.capitalize()}: in no layer beyond the controls.")
            continue
        best = max(told, key=lambda row: row["skill"]["value"])
        where = _ranges([row["layer"] for row in told])
        sentences.append(
            f"{question.capitalize()}: {where}, best in layer {best['layer']} ({plus_minus(best['skill'])})."
        )
    return sentences


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in words.

    >>> _ranges([0, 1, 2, 5])
    'layers 0 to 2 and 5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    joined = " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return f"{'layer' if len(numbers) == 1 else 'layers'} {joined}"


def _told_by_patching(result: Mapping[str, Any]) -> list[str]:
    patching = result["patching"]
    if not patching["rows"]:
        return []
    first, dealt = patching["rows"][0]["donor"], patching["rows"][-1]["donor"]
    middle = patching["median"]
    more = [row for row in patching["rows"] if row["donor"] == dealt and row["more"]["low"] > 0]
    layers = len({row["layer"] for row in patching["rows"]})
    return [
        f"Patching: a layer that works with another sentence's codes ({first}, other words) moves the output by "
        f"{middle[first]:.3f} (median of {layers} layers); the same numbers dealt to other heads move it by "
        f"{middle[dealt]:.3f}, clearly more in {len(more)} layers. The two sentences' own outputs are "
        f"{patching['unpatched'][first]:.2f} apart."
    ]


def _told_by_check(result: Mapping[str, Any]) -> str:
    layers = result["layers"]
    worst = max(layer["relative_error"] for layer in layers)
    exact = sum(layer["reproduces"] for layer in layers)
    return (
        f"The check: in {exact} of {len(layers)} layers the generated networks, applied pair by pair, add up to the "
        f"layer's own output; the largest relative error is {worst:.0e}."
    )


def _separation(result: Mapping[str, Any]) -> list[Block]:
    rows, card = result["separation"], result["card"]
    details = [
        {
            "layer": row["layer"],
            "question": row["question"],
            "skill": plus_minus(row["skill"]),
            **{name: round(value, 3) for name, value in row["controls"].items()},
            "ahead of the best": plus_minus(min(row["ahead"].values(), key=lambda each: each["value"])),
            "clear": "yes" if row["clear"] else "no",
        }
        for row in rows
    ]
    blocks: list[Block] = [
        Text(
            "A linear discriminant guesses the class of a pair from its code alone; a quarter of the sentences is held "
            "out at a time. The controls get the same decoder. Heads shuffled: every code's numbers dealt to other "
            "heads, which leaves how large they are and not whose they are. Untrained: the same configuration with "
            "random weights: what tokens and positions give by themselves. Labels shuffled: nothing to find. "
            "± holds for all of the page's comparisons together with 95 %."
        )
    ]
    if any(about["example"] for about in card["questions"].values()):
        blocks.append(
            Text(
                "The relations are asked of built sentences in pairs: the two words stand at the same positions in "
                "both and (but for the same word twice) are the same, and only in one of them they are related. "
                "Neither position nor the two words can tell."
            )
        )
    blocks += [Heading("By question"), Points([*_by_question(rows), *not_asked(card)])]
    return [*blocks, Heading("Every comparison"), Folded("All numbers", Table(details))]


def _pairs(result: Mapping[str, Any]) -> list[Block]:
    texts = result["texts"]
    blocks: list[Block] = [
        Text(
            "The pairs whose generated network adds most to the query (orange; blue is the key that it reads, green "
            "where they are one), measured by the layer's mean output; no two with the same words. Under each, the "
            "most similar codes of other sentences with their cosine similarity. Click a layer to unfold it."
        )
    ]
    for layer in result["layers"]:
        names = [
            f"{_word(texts, pair, 'query')} → {_word(texts, pair, 'key')}" for pair in layer["strongest"][:_PAIRS_NAMED]
        ]
        summary = f"Layer {layer['layer']}: {', '.join(names)}, …"
        blocks.append(MarkedPairs(layer["strongest"], texts, summary, is_open=layer is result["layers"][0]))
    if any(layer["nearest"] for layer in result["layers"]):
        blocks += [
            Heading("What a pair shares with the pair whose code is most like its own"),
            Text("In another sentence; in brackets with a pair drawn at random in its place."),
            Table([{"layer": layer["layer"], **_shared(layer["nearest"])} for layer in result["layers"]]),
        ]
    return blocks


def _shared(nearest: Mapping[str, Any]) -> dict[str, str]:
    return {f"same {name}": f"{each['nearest']:.0%} ({each['random']:.0%})" for name, each in nearest.items()}


def _word(texts: Sequence[Sequence[str]], pair: Mapping[str, Any], side: str) -> str:
    return texts[pair["text"]][pair[side]].lstrip("Ġ▁")


def _dimension(result: Mapping[str, Any]) -> list[Block]:
    rows = []
    for layer in result["layers"]:
        spread = layer["dimension"]
        rows.append(
            {
                "layer": layer["layer"],
                "codes": plus_minus(spread["codes"], 1),
                "90 % in": layer["directions"],
                "codes of length 1": plus_minus(spread["unit"], 1),
                "heads shuffled": plus_minus(spread["unit shuffled"], 1),
                "untrained": plus_minus(spread["unit untrained"], 1) if "unit untrained" in spread else "–",
                "rank of W": "–" if layer["rank"] is None else f"{layer['rank']:.0f}",
                "adds most from": "{} {:.0%}".format(*next(iter(layer["from_kinds"].items()))),
            }
        )
    return [
        Text(
            f"In how many directions the codes vary, of {result['card']['heads']}: 1 is a line, as many as heads is "
            f"alike in all. Codes differ most in how large they are, so the same is told of codes scaled to length 1, "
            f"beside those with their heads shuffled and untrained ones. 90 % in: directions that hold nine tenths of "
            f"the variance. Rank of W: effective rank of the generated matrices, the exponential of the entropy of "
            f"their singular values. The last column: the kind of keys that adds most, and its share."
        ),
        Table(rows),
    ]


def _patching(result: Mapping[str, Any], pictures: Path) -> list[Block]:
    patching = result["patching"]
    if not patching["rows"]:
        return [Text(f"Nothing was patched: {patching['why_not']}.")]
    unit = (
        "the share of the next token's probability that moves"
        if result["card"]["answer"] == "next token"
        else "1 − cosine similarity of the mean of the last hidden states"
    )
    examples = [
        f"{name}: {' '.join(word_of(token)[0] for token in tokens)}" for name, tokens in patching["examples"].items()
    ]
    table: dict[int, dict[str, Any]] = {}
    for row in patching["rows"]:
        line = table.setdefault(row["layer"], {"layer": row["layer"]})
        line[row["donor"]] = plus_minus(row["moved"], 3)
        if "more" in row:
            line[f"{row['donor']}, more by"] = plus_minus(row["more"], 4)
    apart = ", ".join(f"{name} {value:.3f}" for name, value in patching["unpatched"].items())
    return [
        Text(
            f"All codes of one layer are replaced by those of another sentence, and its networks work on this "
            f"sentence's tokens. Moved: {unit}. Without a patch the outputs of the two are apart by: {apart}. "
            f"Codes that are structured, and not the fingerprint of the words, disturb little when they come from a "
            f"sentence of the same structure, and much when the same numbers go to other heads."
        ),
        *([Points(examples)] if examples else []),
        Figure(
            lens_patching(patching["rows"], pictures / "patching")[0], "How far the output moves, by patched layer."
        ),
        Table(list(table.values())),
    ]


def _check(result: Mapping[str, Any]) -> list[Block]:
    rows = [
        {
            "layer": layer["layer"],
            "largest difference": f"{layer['error']:.1e}",
            "relative": f"{layer['relative_error']:.1e}",
            "reproduces": "yes" if layer["reproduces"] else "no",
        }
        for layer in result["layers"]
    ]
    unreadable = [f"Layer {layer} cannot be read: {why}." for layer, why in result["unreadable"].items()]
    return [
        Text(
            f"Every pair's network applied to its key in float64, summed over the keys, beside the layer's own output; "
            f"a layer reproduces if the relative error (root mean square) is at most {result['card']['tolerance']:.0e}."
        ),
        Table(rows),
        *([Points(unreadable)] if unreadable else []),
    ]
