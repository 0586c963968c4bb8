"""Models from elsewhere, and to elsewhere."""

from typing import Any

from headcode.interop.reference import load_reference, to_reference

_HUGGING_FACE = (
    "HeadcodeCache",
    "HeadcodeConfig",
    "HeadcodeForCausalLM",
    "HeadcodeForQuestionAnswering",
    "HeadcodeForSequenceClassification",
    "HeadcodeForTokenClassification",
    "HeadcodeModel",
)

__all__ = ["load_reference", "to_reference", *_HUGGING_FACE]


def __getattr__(name: str) -> Any:
    """The Hugging Face classes: transformers is imported when one of them is asked for."""
    if name not in _HUGGING_FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headcode.interop import causal_lm

    return getattr(causal_lm, name)
