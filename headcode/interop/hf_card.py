"""The model card that `save_pretrained` writes beside the weights."""

import os
from pathlib import Path
from typing import Any

CARD = "README.md"
_TEXT = """---
library_name: transformers
tags: [headcode, {method}]
{pipeline}---

# {name}

A model of the package `headcode` with {parameters:,} parameters. Its attention is read as a hypernetwork: the scores
that one query gives one key, across the heads, are a code that configures a small network ("Attention as a
Hypernetwork", arXiv 2406.05816). The method is `{method}`.

| | |
| --- | --- |
{rows}

```python
import headcode.interop.causal_lm                     # makes the architecture known to transformers
from transformers import {auto}

model = {auto}.from_pretrained("{name}")
codes = model(tokens, output_attentions=True).attentions   # the codes of each layer: (batch, head, query, key)
```

What it was trained on, for what use, and how well it does is for its author to say here.
"""
_ROWS = {
    "method": "method",
    "layers": "num_layers",
    "heads": "num_heads",
    "width": "dim",
    "vocabulary": "vocab_size",
    "position": "position",
    "length": "max_position_embeddings",
}
_PIPELINES = {
    "CausalLM": "text-generation",
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
    "QuestionAnswering": "question-answering",
}


def write_card(model: Any, folder: str | os.PathLike) -> None:
    """README.md, unless there is one already: its author's words stay."""
    path = Path(folder) / CARD
    if path.exists() or not path.parent.is_dir():
        return
    head = type(model).__name__.partition("For")[2]
    auto = f"AutoModelFor{head}" if head in _PIPELINES else "AutoModel"
    pipeline = f"pipeline_tag: {_PIPELINES[head]}\n" if head in _PIPELINES else ""
    rows = "\n".join(f"| {title} | {getattr(model.config, field)} |" for title, field in _ROWS.items())
    values = {"name": path.parent.resolve().name, "method": model.config.method, "rows": rows, "auto": auto}
    path.write_text(_TEXT.format(**values, parameters=model.num_parameters(), pipeline=pipeline), encoding="utf-8")
