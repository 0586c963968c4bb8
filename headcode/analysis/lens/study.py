"""Everything that the lens says about a model, as one JSON object: what `headcode lens` makes its page of.

result = study_model("all-minilm-folder", open("text.txt").read())
result["separation"]       per layer and question: skill, controls, intervals, and whether it is clear
result["layers"]           per layer: the check, dimension of the codes, strongest pairs with similar codes
result["patching"]         per layer and donor: how far the output moves when codes are taken from it
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from headcode.analysis.lens.collect import Collection, dimension, directions, shares_by_kind
from headcode.analysis.lens.layer import TOLERANCE
from headcode.analysis.lens.models import LensModel, open_model
from headcode.analysis.lens.neighbours import agreement, strongest_pairs
from headcode.analysis.lens.patching import patch_layers, patched_sentences, unpatched_distance
from headcode.analysis.lens.questions import ask_of_built, ask_of_passages, passages
from headcode.analysis.lens.reading import read_text
from headcode.analysis.lens.separation import critical_value, separation

Progress = Callable[[str], None]


def study_model(
    model: str | Path | nn.Module | LensModel,
    texts: str | Sequence[str] | Sequence[Sequence[int]] | Tensor,
    *,
    tokenizer: Any = None,
    layers: Sequence[int] | None = None,
    max_texts: int = 64,
    max_tokens: int = 64,
    built: int = 96,
    patched: int = 24,
    seed: int = 0,
    progress: Progress = lambda words: None,
) -> dict[str, Any]:
    """What the layers' codes separate, beside controls; their dimension; strongest pairs; patching.

    Args:
        texts: a text, which is read sentence by sentence; sentences; lists of token ids; or, for a model that sees
            images, pixels (N, channels, height, width).
        max_texts, max_tokens: how many sentences, and how many tokens of each.
        built: minimal pairs per relation (see `sentences`); they need a tokenizer.
        patched: sentences whose codes are replaced.
        progress: told what is done next.
    """
    for name, value in (("max_texts", max_texts), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if built < 0 or patched < 0:
        raise ValueError(f"built and patched must be 0 or more, got {built} and {patched}.")
    if isinstance(texts, str) and not texts.strip():
        raise ValueError("The text is empty; the lens reads sentences, eight or more.")
    progress("opening the model")
    in_words = isinstance(texts, str) or any(isinstance(each, str) for each in texts)
    opened = open_model(model, tokenizer=tokenizer, reads_text=in_words)
    wanted = sorted(opened.check_layers(layers))
    if isinstance(texts, Tensor) != (opened.vocab_size is None):
        sees, given = ("images", "texts") if opened.vocab_size is None else ("texts", "images")
        raise ValueError(f"{opened.name} sees {sees}, and {given} were given.")
    chosen = passages(texts, max_texts) if isinstance(texts, str) else list(texts)[:max_texts]
    if isinstance(texts, str) and not chosen:
        chosen = [texts]
    if not chosen:
        raise ValueError("The lens needs at least one text.")
    corpus = [read_text(opened, each, max_tokens) for each in chosen]
    num_passages = len(corpus)
    questions, not_asked = ask_of_passages(corpus, opened.causal, seed)
    if opened.has_tokenizer and built:
        more, relations, reasons = ask_of_built(opened, built, len(corpus), seed)
        corpus, questions, not_asked = corpus + more, questions + relations, not_asked | reasons
    progress(f"reading {len(corpus)} texts")
    seen = Collection(corpus, num_passages, questions, seed).run(opened, wanted)
    if not seen.features:
        number, reason = next(iter(sorted(opened.unreadable.items())))
        raise ValueError(f"No layer of {opened.name} can be read; layer {number}: {reason}.")
    progress("reading them with untrained weights")
    blank = Collection(corpus, num_passages, questions, seed).run(opened.untrained(seed), wanted, sizes=False)
    progress("asking what codes separate")
    rows = separation({"trained": seen.features, "untrained": blank.features}, questions, seed)
    progress("patching codes between sentences")
    patching = _patching(opened, chosen if opened.vocab_size is None else None, patched, seed)
    return {
        "card": {
            "what": "lens",
            "model": opened.name,
            "heads": opened.num_heads,
            "num_layers": opened.num_layers,
            "causal": opened.causal,
            "answer": "next token" if opened.predicts else "embedding",
            "passages": num_passages,
            "pairs_of_passages": int(sum(text.length**2 for text in corpus[:num_passages])),
            "built_sentences": len(corpus) - num_passages,
            "questions": {q.name: {"classes": q.classes, "pairs": len(q), "example": q.example} for q in questions},
            "not_asked": not_asked,
            "comparisons": len(rows) * 3,
            "tolerance": TOLERANCE,
            "seed": seed,
        },
        "unreadable": {str(layer): reason for layer, reason in sorted(opened.unreadable.items())},
        "layers": [_layer_facts(number, seen, blank, seed) for number in sorted(seen.features)],
        "separation": rows,
        "patching": patching,
        "texts": [text.names for text in corpus[:num_passages]],
    }


def _layer_facts(number: int, seen: Collection, blank: Collection, seed: int) -> dict[str, Any]:
    z = critical_value(len(seen.features) * 4)
    moments = {name: [each[name] for each in seen.moments[number]] for name in seen.moments[number][0]}
    moments |= {"unit untrained": [each["unit"] for each in blank.moments[number]]} if number in blank.moments else {}
    pairs = seen.pairs(number)
    facts = seen.facts.get(number, {})
    errors = seen.errors[number]
    return {
        "layer": number,
        "error": max(error for error, _ in errors),
        "relative_error": max(relative for _, relative in errors),
        "reproduces": all(relative <= TOLERANCE for _, relative in errors),
        "dimension": {name: dimension(each, z, seed) for name, each in moments.items()},
        "directions": directions(moments["codes"]),
        "norm": facts.get("norm_mean"),
        "rank": facts.get("rank_mean"),
        "from_kinds": shares_by_kind(seen.sizes_by_kind[number]),
        "strongest": strongest_pairs(pairs, seen.texts),
        "nearest": agreement(pairs, seen.texts, seed),
    }


def _patching(model: LensModel, images: list[Any] | None, count: int, seed: int) -> dict[str, Any]:
    """Rows of `patch_layers`, the distance without a patch, and words where nothing could be patched."""
    if count < 2:
        return {"rows": [], "why_not": "fewer than two sentences were to be patched"}
    recipients: list[Any]
    donors: dict[str, list[Any]]
    if images is not None:
        recipients, donors = images[:count], {"other image": [*images[1:count], images[0]]}
    elif not model.has_tokenizer:
        return {"rows": [], "why_not": "the sentences to patch are built from words, which need a tokenizer"}
    else:
        recipients, donors = patched_sentences(model, count, seed)
    if len(recipients) < 2:
        return {"rows": [], "why_not": "too few sentences are equally long in this model's tokens"}
    layers = model.num_layers - len(model.unreadable)
    rows = patch_layers(model, recipients, donors, critical_value(layers * (2 * len(donors) + 1)), seed)
    yardstick = {name: unpatched_distance(model, recipients, texts) for name, texts in donors.items()}
    examples = (
        {}
        if images is not None
        else {
            "recipient": model.token_names(recipients[0]),
            **{name: model.token_names(texts[0]) for name, texts in donors.items()},
        }
    )
    return {"rows": rows, "unpatched": yardstick, "examples": examples, "median": _median(rows)}


def _median(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Over the layers, per donor."""
    donors = dict.fromkeys(row["donor"] for row in rows)
    return {name: float(np.median([r["moved"]["value"] for r in rows if r["donor"] == name])) for name in donors}
