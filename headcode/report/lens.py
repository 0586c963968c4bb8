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
_TOLD, _PAIRS_NAMED = 4, 3


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


def layer_sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """What one layer's codes separate, in words."""
    layer = rows[0]["layer"]
    told = sorted((row for row in rows if is_told(row)), key=margin, reverse=True)
    if not told:
        return f"Layer {layer}: nothing that the controls do not tell as well."
    parts = [
        f"{row['question']} {plus_minus(row['skill'])} (best control {max(row['controls'].values()):.2f})".replace(
            "control -", "control −"
        )
        for row in told[:_TOLD]
    ]
    rest = [row["question"] for row in told[_TOLD:]]
    return f"Layer {layer}: " + ", ".join(parts) + (f"; also {', '.join(rest)}" if rest else "") + "."


def _summary(result: Mapping[str, Any]) -> list[Block]:
    rows = result["separation"]
    by_layer = {row["layer"]: [r for r in rows if r["layer"] == row["layer"]] for row in rows}
    known = [*_told_by_patching(result), _told_by_check(result)]
    if not rows:
        return [Points(known)]
    return [
        Text(_verdict(result, [row for row in rows if is_told(row)])),
        _heat(result),
        Points([*_by_question(rows), *known]),
        Heading("Layer by layer"),
        Points([layer_sentence(each) for each in by_layer.values()]),
    ]


def _heat(result: Mapping[str, Any]) -> Heat:
    rows = result["separation"]
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    found = {(row["question"], row["layer"]): (row["skill"]["value"], is_told(row)) for row in rows}
    cells = {name: [found.get((name, layer)) for layer in layers] for name in result["card"]["questions"]}
    return Heat("skill, by layer", [str(layer) for layer in layers], cells)


def _verdict(result: Mapping[str, Any], told: Sequence[Mapping[str, Any]]) -> str:
    count = len(result["separation"])
    questions = {row["question"] for row in told}
    asked = len(result["card"]["questions"])
    if not told:
        return f"No: in none of {count} questions to a layer do its codes tell more than every control. "
    return (
        f"Are the codes structured? In {len(told)} of {count} questions to a layer, which cover {len(questions)} of "
        f"{asked} kinds of questions, its codes tell classes of pairs apart clearly and by at least {WORTH_TELLING} "
        f"better than all three controls: the same numbers dealt to other heads, the same model untrained, and "
        f"shuffled labels. The numbers are skills on sentences that the decoder has not seen: 0 is guessing, 1 is "
        f"always right; ± holds for all of the page's comparisons together with 95 %."
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
    relations = [f"{name}: {about['example']}." for name, about in card["questions"].items() if about["example"]]
    classes = [
        f"{name}: {', '.join(about['classes'])}." for name, about in card["questions"].items() if not about["example"]
    ]
    not_asked = [f"Not asked: {name}, because {why}." for name, why in card["not_asked"].items()]
    blocks: list[Block] = [
        Text(
            "A linear discriminant guesses the class of a pair from its code alone; a quarter of the sentences is held "
            "out at a time. In the table above, cells are tinted where the codes are clearly ahead of every control, "
            "by 0.1 or more. The controls get the same decoder. Heads shuffled: every code's numbers dealt to other "
            "heads, which leaves how large they are and not whose they are. Untrained: the same configuration with "
            "random weights: what tokens and positions give by themselves. Labels shuffled: nothing to find."
        ),
        Heading("What was asked"),
        Points([*classes, *relations, *not_asked]),
    ]
    if relations:
        blocks.append(
            Text(
                "The relations are asked of built sentences in pairs: the two words stand at the same positions in "
                "both and (but for the same word twice) are the same, and only in one of them they are related. "
                "Neither position nor the two words can tell."
            )
        )
    return [*blocks, Heading("Every comparison"), Folded("All numbers", Table(details))]


def _pairs(result: Mapping[str, Any]) -> list[Block]:
    texts = result["texts"]
    blocks: list[Block] = [
        Text(
            "The pairs whose generated network adds most to the query (orange; blue is the key that it reads, green "
            "where they are one), relative to the layer's mean output; no two with the same words. Unfolded, each "
            "stands in its sentence, and under it the most similar codes of other sentences with their cosine "
            "similarity."
        )
    ]
    for layer in result["layers"]:
        names = [
            f"{_word(texts, pair, 'query')} → {_word(texts, pair, 'key')}" for pair in layer["strongest"][:_PAIRS_NAMED]
        ]
        summary = f"Layer {layer['layer']}: {', '.join(names)}, …"
        blocks.append(MarkedPairs(layer["strongest"], texts, summary))
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
