"""Small models with a tokenizer of whole words, for the lens."""

from headcode.analysis.lens import sentences

TEXT = """The old dog saw a cat near the tree. Now the king slept, and the girl ran. A bird sang there ( it left ) .
The small boy found 12 horses behind the man. Yesterday the doctor met the teacher, who smiled. It is not so big, they
knew. The farmer heard the bird with the woman. Under the tree the quiet cat waited today. The girl and the boy laughed.
"""


def save_word_model(folder, kind="bert", **changes):
    """A random model whose tokenizer has TEXT and the built sentences as words."""
    import tokenizers
    import torch
    import transformers

    lists = [value for name, value in vars(sentences).items() if name.isupper() and isinstance(value, list)]
    words = ["[UNK]", "[CLS]", "[SEP]", *"the a ( ) . , and it is not so they who tree horses".split()]  # noqa: SIM905
    words += [word for each in lists for word in each if word not in words]
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    plain.normalizer = tokenizers.normalizers.Lowercase()
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    plain.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    fast.save_pretrained(folder)
    config = transformers.AutoConfig.for_model(
        kind,
        **{
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "intermediate_size": 16,
            "vocab_size": len(numbers),
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **changes,
        },
    )
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5 if parameter.dim() == 1 else 0.2)
    model.save_pretrained(folder)
    return folder
