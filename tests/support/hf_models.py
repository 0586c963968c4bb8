"""Small Hugging Face models on which the library's behaviours are tried: its own Llama, and ours of three methods."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)

from headcode.interop import (
    HeadcodeConfig,
    HeadcodeForCausalLM,
    HeadcodeForQuestionAnswering,
    HeadcodeForSequenceClassification,
    HeadcodeForTokenClassification,
    HeadcodeModel,
)

METHODS = ("softmax", "linear", "hyla")
KINDS = ("llama", *METHODS)
VOCABULARY, LAYERS, HEADS, WIDTH = 53, 3, 4, 32
_CLASSES = {
    "base": (LlamaModel, HeadcodeModel),
    "lm": (LlamaForCausalLM, HeadcodeForCausalLM),
    "labels": (LlamaForSequenceClassification, HeadcodeForSequenceClassification),
    "token labels": (LlamaForTokenClassification, HeadcodeForTokenClassification),
    "answers": (LlamaForQuestionAnswering, HeadcodeForQuestionAnswering),
}


def config(kind, **changes):
    """Of a Llama, or of ours with this method; `changes` are settings that both have."""
    values = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": WIDTH}
    values |= {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None} | changes
    if kind == "llama":
        values = {"intermediate_size": 37, "attn_implementation": "eager", "tie_word_embeddings": True} | values
        return LlamaConfig(**values)
    values = {"qk_dim": WIDTH, "v_dim": WIDTH, "mlp_dim": 37, "backend": "reference", "position": "rotary"} | values
    return HeadcodeConfig(method=kind, **values)


def model_class(kind, head="lm"):
    return _CLASSES[head][kind != "llama"]


def model(kind, head="lm", **changes):
    torch.manual_seed(0)
    return model_class(kind, head)(config(kind, **changes)).eval()


def tokens(batch=2, length=7, seed=3):
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(found, expected, tolerance=1e-4):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
