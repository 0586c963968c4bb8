"""Models of Hugging Face's transformers under the lens: hooks on the attention, whose weights are the codes."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headcode.analysis.lens.models import Batch, Edit, Layer, LensModel, Visit, last_token, mean_of_tokens
from headcode.interop.huggingface import (
    Architecture,
    AttentionWeights,
    architecture_of,
    load_pretrained,
    longest_text,
    part,
    read_attention,
)
from headcode.interop.streaming import StoredTensors, untrained

_HEADS = ("lm_head.weight", "embed_out.weight")
"""What a folder calls the matrix of the logits, where it is not the embedding."""


def open_folder(name: str | Path, reads_text: bool) -> LensModel:
    return open_pretrained(*load_pretrained(name, tokenizer=reads_text))


def open_pretrained(model: nn.Module, tokenizer: Any = None) -> LensModel:
    return PretrainedModel(model, tokenizer)


class PretrainedModel(LensModel):
    """A base model of transformers with eager attention."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self.config: Any = model.config
        self.architecture: Architecture = architecture_of(self.config)
        found = part(model, self.architecture.layers)
        if found is None:
            raise ValueError(
                f"{type(model).__name__} has no {self.architecture.layers}: give the base model (AutoModel)."
            )
        if getattr(self.config, "_attn_implementation", "eager") != "eager":
            raise ValueError(
                "Attention weights are only seen with attn_implementation='eager'; load the model with it."
            )
        self.blocks: list[nn.Module] = list(found)  # type: ignore[call-overload]
        self.num_layers, self.num_heads = len(self.blocks), self.config.num_attention_heads
        self.vocab_size = None if self.architecture.sees_images else self.config.vocab_size
        self.max_length = sys.maxsize if self.architecture.sees_images else longest_text(model)
        self.specials = frozenset(getattr(tokenizer, "all_special_tokens", None) or ())
        self.causal = self.architecture.predicts
        self._head = self._find_head() if self.causal else None
        self.predicts = self._head is not None

    @property
    def has_tokenizer(self) -> bool:
        return self.tokenizer is not None

    def encode(self, text: str, special: bool = True) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def token_names(self, ids: Sequence[int]) -> list[str]:
        if self.tokenizer is None:
            return [str(i) for i in ids]
        return [str(token) for token in self.tokenizer.convert_ids_to_tokens(list(ids))]

    def untrained(self, seed: int) -> LensModel:
        return PretrainedModel(untrained(self.model, self.architecture.layers, seed), self.tokenizer)

    def patch_grid(self, image: Tensor) -> tuple[int, int]:
        size, channels = self.config.image_size, self.config.num_channels
        if tuple(image.shape) != (channels, size, size):
            raise ValueError(f"Images must be ({channels}, {size}, {size}), got {tuple(image.shape)}.")
        return size // self.config.patch_size, size // self.config.patch_size

    @property
    def _filler(self) -> int:
        return getattr(self.config, "pad_token_id", None) or 0

    def run(
        self,
        batch: Batch,
        visit: Visit | None = None,
        edit: Edit | None = None,
        layers: Iterable[int] | None = None,
        answer: bool = False,
    ) -> Tensor | None:
        watched = [_Watched(self, number, batch.lengths, visit, edit) for number in sorted(self.check_layers(layers))]
        training = self.model.training
        called = part(self.model, self.architecture.called) if self.architecture.called else self.model
        assert called is not None
        try:
            with torch.no_grad():
                self.model.eval()  # dropout would show in the codes
                hidden = called(**self._arguments(batch))[0]
        finally:
            self.model.train(training)
            for each in watched:
                each.remove()
        if not answer:
            return None
        if self._head is None:
            return mean_of_tokens(hidden, batch)
        logits = last_token(hidden, batch) @ self._head.T
        if cap := getattr(self.config, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        return logits.double().softmax(-1)

    def _arguments(self, batch: Batch) -> dict[str, Any]:
        if self.architecture.sees_images:
            return {"pixel_values": batch.inputs}
        given: dict[str, Any] = {"input_ids": batch.inputs, "attention_mask": batch.mask.long()}
        # A cache would hold keys and values of all layers.
        return given | ({"use_cache": False} if hasattr(self.config, "use_cache") else {})

    def _find_head(self) -> Tensor | None:
        stored: StoredTensors | None = getattr(self.model, "stored_tensors", None)
        if stored is not None:
            for name in _HEADS:
                if (head := stored.read(name)) is not None:
                    return head
        if getattr(self.config, "tie_word_embeddings", False):
            weight: Tensor = self.model.get_input_embeddings().weight.detach().float()
            return weight
        return None


class _Watched:
    """Hooks on one layer: its weights before it runs, tokens and codes in its attention, its output behind it."""

    def __init__(
        self, model: PretrainedModel, number: int, lengths: list[int], visit: Visit | None, edit: Edit | None
    ) -> None:
        self.model, self.number, self.lengths, self.visit, self.edit = model, number, lengths, visit, edit
        self.weights: AttentionWeights | None = None
        self.seen: dict[str, Tensor] = {}
        self.change: Tensor | None = None
        self.block = model.blocks[number]
        attention, output = (part(self.block, getattr(model.architecture, n)) for n in ("attention", "output"))
        # A streamed layer gets its weights by a hook that stands before ours, and loses them by one behind ours.
        self.handles = [
            self.block.register_forward_pre_hook(self._enter),
            self.block.register_forward_hook(self._leave, prepend=True),
        ]
        self.holds_output = False
        if attention is not None and output is not None:
            self.holds_output = any(module is output for module in attention.modules())
            self.handles.append(attention.register_forward_hook(self._attend, with_kwargs=True))
            self.handles.append(output.register_forward_hook(self._finish))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, block: nn.Module, arguments: Any) -> None:
        try:
            self.weights = read_attention(block, self.model.architecture, self.model.config)
        except ValueError as error:
            self.model.unreadable[self.number] = str(error)

    def _attend(self, module: nn.Module, arguments: Any, options: Any, result: Any) -> Any:
        tokens = arguments[0] if arguments else options.get("hidden_states", options.get("query"))
        entry = self.model.architecture.weights_entry
        if tokens is not None:
            self.seen["tokens"] = tokens.detach()
        if isinstance(result, tuple) and len(result) > entry and isinstance(result[entry], Tensor):
            self.seen["codes"] = result[entry].detach()
        if self.edit is None or self._reason() is not None:
            return None
        layer = self._layer()
        codes = self.edit(layer)
        if codes is None:
            return None
        change = layer.change(codes).to(result[0])
        if not self.holds_output:
            self.change = change
            return None
        return (result[0] + change, *result[1:])

    def _finish(self, module: nn.Module, arguments: Any, result: Tensor) -> Tensor | None:
        self.seen["output"] = result.detach()
        return None if self.change is None else result + self.change

    def _leave(self, block: nn.Module, arguments: Any, result: Any) -> None:
        reason = self._reason("tokens", "codes", "output")
        if reason is not None:
            self.model.unreadable.setdefault(self.number, reason)
        elif self.visit is not None:
            self.visit(self._layer())
        self.weights, self.seen, self.change = None, {}, None

    def _reason(self, *needed: str) -> str | None:
        """Why the layer cannot be read."""
        if self.weights is None:
            return "its weights cannot be read"
        if lacking := [name for name in needed or ("tokens", "codes") if name not in self.seen]:
            return f"its attention did not show its {lacking[0]} in the forward pass"
        codes, tokens = self.seen["codes"], self.seen["tokens"]
        if codes.shape[1] != self.weights.value.shape[0] or codes.shape[3] != tokens.shape[1]:
            return f"its attention weights have shape {tuple(codes.shape[1:])}, not (heads, queries, keys)"
        return None

    def _layer(self) -> Layer:
        assert self.weights is not None
        tokens, codes = self.seen["tokens"], self.seen["codes"]
        return Layer(self.number, codes, self.weights, tokens, self.lengths, self.seen.get("output"))
