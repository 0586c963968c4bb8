"""Hugging Face models as one graph, with masks: exported, and compiled for inference and training; Llama and ours.

`docs/huggingface.md` has a row for each of these tests.
"""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

from tests.support.hf_models import KINDS, close, model, tokens

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", KINDS)]
PADDED = torch.cat((torch.zeros(2, 3).long(), torch.ones(2, 7).long()), 1)


def inputs(side="left"):
    mask = PADDED if side == "left" else PADDED.flip(1)
    return {"input_ids": tokens(2, 10), "attention_mask": mask, "use_cache": False}


def test_export_with_a_mask(kind):
    """One graph for every mask: what was padded while tracing does not matter."""
    one = model(kind)
    program = torch.export.export(one, (), inputs(), strict=False)
    for side in ("left", "right"):
        seen = inputs(side)["attention_mask"] == 1
        found = program.module()(**inputs(side)).logits
        close(found[seen], one(**inputs(side)).logits[seen])


def test_a_full_graph_with_a_mask(kind):
    """Logits, loss and gradients of the compiled model are those of the model."""
    one = model(kind).train()
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    for side in ("left", "right"):
        labels = inputs(side)["input_ids"].masked_fill(inputs(side)["attention_mask"] == 0, -100)
        found = []
        for called in (compiled, one):
            one.zero_grad()
            loss = called(**inputs(side), labels=labels).loss
            loss.backward()
            found.append((loss.detach(), [parameter.grad.clone() for parameter in one.parameters()]))
        close(found[0], found[1])


@torch.no_grad()
@pytest.mark.parametrize("cache_class", [StaticCache, DynamicCache])
def test_a_full_graph_goes_on_from_a_cache(kind, cache_class):
    """Token by token, after a prompt that ran without a graph."""
    torch.compiler.reset()  # graphs of the cases before count towards the limit of recompilations
    one = model(kind)
    compiled = torch.compile(one.forward, fullgraph=True, backend="aot_eager")
    cache = StaticCache(one.config, 16) if cache_class is StaticCache else DynamicCache(config=one.config)
    one(tokens()[:, :4], past_key_values=cache)
    found = [compiled(input_ids=tokens()[:, i : i + 1], past_key_values=cache).logits for i in (4, 5, 6)]
    close(torch.cat(found, 1), one(tokens()).logits[:, 4:])
