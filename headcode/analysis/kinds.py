"""Kinds of tokens, and whether the codes of a pretrained model go with them."""

import string
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

KINDS = ("special", "punctuation", "number", "function word", "continuation", "word")
_FUNCTION_WORDS = frozenset(
    """
    a an the and or but nor so yet if then than as of at by for from in into on onto off out over to under up with
    without about is are was were be been being am do does did have has had will would shall should can could may might
    must not no this that these those it its he she they we you i him her them us me my your his their our who whom
    whose which what when where why how there here
    """.split()  # noqa: SIM905
)


def token_kinds(tokens: Sequence[str], specials: set[str] | frozenset[str] = frozenset()) -> list[str]:
    """A coarse kind for every token: special, punctuation, number, function word, continuation or word.

    >>> token_kinds(["[CLS]", "the", "cat", "##s", ",", "12"], {"[CLS]"})
    ['special', 'function word', 'word', 'continuation', 'punctuation', 'number']
    """
    starts = any(token.startswith(("Ġ", "▁")) for token in tokens)
    kinds = []
    for place, token in enumerate(tokens):
        bare = token.lstrip("Ġ▁ ").removeprefix("##").strip()
        if token in specials:
            kinds.append("special")
        elif bare and all(c in string.punctuation + "“”‘’–—…«»" for c in bare):
            kinds.append("punctuation")
        elif bare and all(c.isdigit() or c in ".," for c in bare):
            kinds.append("number")
        elif token.startswith("##") or (starts and place and not token.startswith(("Ġ", "▁")) and bare.isalpha()):
            kinds.append("continuation")
        elif bare.lower() in _FUNCTION_WORDS:
            kinds.append("function word")
        else:
            kinds.append("word")
    return kinds


def cluster_by_kind(codes: Tensor, kinds: Sequence[str], *, seed: int = 0) -> dict[str, Any]:
    """Whether codes (H, query, key) go with the kinds of their tokens.

    `mean_codes` has the mean code of every (query kind, key kind). `explained` is the share of the codes' variance that
    lies between such groups, and `agreement` the adjusted mutual information between k-means clusters of the codes (as
    many as there are kinds of keys) and the key's kind; `control` is each with the kinds dealt out at random.
    """
    points = codes.double().permute(1, 2, 0).numpy()  # (q, k, H)
    visible = np.abs(points).sum(-1) > 0
    rows = points[visible]
    names = [kind for kind in KINDS if kind in set(kinds)]
    labels = np.array([names.index(kind) for kind in kinds])
    pairs = _pair_labels(labels, visible)
    means = {
        f"{names[g // len(KINDS)]} → {names[g % len(KINDS)]}": rows[pairs == g].mean(0).round(6).tolist()
        for g in np.unique(pairs)
    }
    rng = np.random.default_rng(seed)
    dealt = [_pair_labels(rng.permutation(labels), visible) for _ in range(10)]
    clusters, agreement = _clusters(rows, len(names), seed)
    return {
        "kinds": names,
        "mean_codes": means,
        "explained": {
            "share": _explained(rows, pairs),
            "control": float(np.mean([_explained(rows, d) for d in dealt])),
        },
        "agreement": {
            "share": float(agreement(pairs % len(KINDS), clusters)),
            "control": float(np.mean([agreement(d % len(KINDS), clusters) for d in dealt])),
        },
        "cluster_seed": seed,
    }


def _pair_labels(labels: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """One number per visible pair: the kind of its query times the number of kinds, plus the kind of its key."""
    return (labels[:, None] * len(KINDS) + labels[None])[visible]


def _explained(rows: np.ndarray, group: np.ndarray) -> float:
    total = ((rows - rows.mean(0)) ** 2).sum()
    between = sum((group == g).sum() * ((rows[group == g].mean(0) - rows.mean(0)) ** 2).sum() for g in np.unique(group))
    return float(between / total) if total else 0.0


def _clusters(rows: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, Any]:
    try:
        from sklearn.cluster import KMeans
        from sklearn.metrics import adjusted_mutual_info_score
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Clusters need scikit-learn: pip install scikit-learn.") from None
    count = min(count, len(np.unique(rows, axis=0)))
    return KMeans(count, n_init=4, random_state=seed).fit_predict(rows), adjusted_mutual_info_score
