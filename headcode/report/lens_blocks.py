"""Parts of the lens's page: a table whose cells are tinted by size, and pairs of words marked in their sentences."""

import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import Any

_AROUND = 6
"""Tokens shown on either side of a pair; what lies between its two words is shown up to twice as many."""
_STARTS = ("Ġ", "▁")


@dataclasses.dataclass(frozen=True)
class Heat:
    """Numbers by row and column, 0 to 1, the tint as strong as the number; unclear ones are grey and without tint.

    The last column says in words what a row is about.
    """

    corner: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[tuple[float, bool] | None]]
    about: str
    meanings: Mapping[str, str]

    def html(self) -> str:
        head = "".join(f'<th class="number">{html.escape(column)}</th>' for column in self.columns)
        head += f"<th>{html.escape(self.about)}</th>"
        body = "".join(
            f"<tr><td>{html.escape(name)}</td>{''.join(self._cell(each) for each in cells)}"
            f'<td class="meaning">{html.escape(self.meanings[name])}</td></tr>'
            for name, cells in self.rows.items()
        )
        return (
            f'<div class="wide"><table class="heat"><thead><tr><th>{html.escape(self.corner)}</th>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    @staticmethod
    def _cell(cell: tuple[float, bool] | None) -> str:
        if cell is None:
            return '<td class="heat unclear">–</td>'
        value, clear = cell
        shown = f"{value:.2f}".replace("-", "−")
        if not clear:
            return f'<td class="heat unclear">{shown}</td>'
        strength = round(60 * min(max(value, 0), 1))
        return (
            f'<td class="heat" style="background:color-mix(in srgb,var(--accent) {strength}%,transparent)">{shown}</td>'
        )


@dataclasses.dataclass(frozen=True)
class MarkedPairs:
    """A pair in its sentence, the query and the key marked, and under it the pairs with the most similar codes."""

    pairs: Sequence[Mapping[str, Any]]
    texts: Sequence[Sequence[str]]
    summary: str
    is_open: bool = False

    def html(self) -> str:
        body = "".join(self._one(pair) for pair in self.pairs)
        return (
            f"<details{' open' if self.is_open else ''}><summary>{html.escape(self.summary)}</summary>{body}</details>"
        )

    def _one(self, pair: Mapping[str, Any]) -> str:
        size = f"{pair['size']:.1f} of the mean output, {pair['share']:.0%} of what this query is given"
        lines = [f"<p>{self._sentence(pair)} <small>({size})</small></p>"]
        for other in pair["alike"]:
            lines.append(f'<p class="alike">{other["similarity"]:.3f} {self._sentence(other)}</p>')
        return f'<div class="pair">{"".join(lines)}</div>'

    def _sentence(self, place: Mapping[str, Any]) -> str:
        return marked(self.texts[place["text"]], place["query"], place["key"])


def marked(tokens: Sequence[str], query: int, key: int) -> str:
    """The words around a pair as HTML, its two tokens marked.

    >>> marked(["the", "cat", "##s", "ran"], 3, 2)
    'the cat<mark class="key">s</mark> <mark class="query">ran</mark>'
    """
    first, last = min(query, key), max(query, key)
    shown = [
        i
        for i in range(len(tokens))
        if first - _AROUND <= i <= first + _AROUND or last - _AROUND <= i <= last + _AROUND
    ]
    spelled = any(token.startswith(_STARTS) for token in tokens)
    pieces: list[str] = []
    for place, i in enumerate(shown):
        word, joined = word_of(tokens[i], spelled)
        words = html.escape(word)
        if i in (query, key):
            kind = "both" if query == key else "query" if i == query else "key"
            words = f'<mark class="{kind}">{words}</mark>'
        gap = place > 0 and i > shown[place - 1] + 1
        if place and not joined:
            pieces.append(" … " if gap else " ")
        pieces.append(words)
    before = "… " if shown[0] > 0 else ""
    return before + "".join(pieces) + (" …" if shown[-1] < len(tokens) - 1 else "")


def word_of(token: str, spelled: bool = False) -> tuple[str, bool]:
    """A token as it reads, and whether it belongs to the word before; `spelled` if others say where words start.

    >>> word_of("##ing"), word_of("Ġcat", True), word_of("s", True)
    (('ing', True), ('cat', False), ('s', True))
    """
    if token.startswith("##"):
        return token[2:], True
    if token.startswith(_STARTS):
        return token[1:] or "␣", False
    return token.replace("Ċ", "⏎"), spelled and token[:1].isalpha()
