"""For the site's API page: examples in docstrings (lines after >>>) become code blocks."""

import re
from typing import Any

import griffe

# Indented ones are code blocks already.
_EXAMPLE = re.compile(r"^>>> .*(?:\n\S.*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **more: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(lambda found: f"\n```pycon\n{found[0]}\n```\n", obj.docstring.value)
