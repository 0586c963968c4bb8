"""Models whose names and tokens are markup, links and scripts."""

import shutil

from headcode import zoo

FOLDERS = [
    "<img src=x onerror=window.hacked=1>",
    'a&model=b#c?"><script>window.hacked=1<',
    "[a](javascript:hacked) %3Cb%3E",
    "two\nlines",
]
TOKENS = [
    "<img src=x onerror=window.hacked=1>",
    '<a href="https://example.org">go</a>',
    '<a href="javascript:window.hacked=1">x</a>',
    "</script><script>window.hacked=1</script>",
    "<b>b</b>",
    "<s>",
    "&lt;i&gt;",
    "%{x}",
    "$x^2$",
]
TEXT = "|".join(TOKENS)
LENS = "<b onclick=window.hacked=1>lens"


def runs(folder):
    """A model of the zoo as run folders with these names."""
    for name in FOLDERS:
        shutil.copytree(zoo.folder("logic-hyla"), folder / name)
    return [str(folder / name) for name in FOLDERS]


def lens(folder):
    """A small random transformer whose vocabulary has these tokens; | stands between them."""
    import tokenizers
    import torch
    import transformers

    folder = folder / LENS
    plain = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({token: i for i, token in enumerate(["?", *TOKENS])}, unk_token="?")
    )
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split("|", "removed")
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?").save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, intermediate_size=16,
        vocab_size=1 + len(TOKENS), bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaModel(config).save_pretrained(folder)
    return str(folder)
