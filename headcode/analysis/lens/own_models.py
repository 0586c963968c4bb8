"""headcode's own language models under the lens: run folders, checkpoints, Transformers and HeadcodeForCausalLM."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headcode.analysis.lens.models import Batch, Edit, Layer, LensModel, Visit, last_token, mean_of_tokens
from headcode.files import is_there, read_object
from headcode.interop.huggingface import AttentionWeights, load_tokenizer
from headcode.nn import HyperAttention, Transformer, capture_codes
from headcode.nn.attention import AttentionCall
from headcode.nn.generation import longest_sequence
from headcode.nn.plain import affine_map
from headcode.ops.options import AttentionInputs, check_call
from headcode.ops.reference import apply_codes, visible_pairs
from headcode.tasks.language.tokenizer import Tokenizer
from headcode.train.checkpoint import find_run, load
from headcode.train.folder import read_run_config, tokenizer_of

_CONFIG = "config.json"


def is_own_model(model: nn.Module) -> bool:
    return isinstance(model, Transformer) or getattr(getattr(model, "config", None), "model_type", None) == "headcode"


def is_own_folder(path: str | Path) -> bool:
    """Whether a path is a run, a checkpoint or a model of headcode's, also one saved for Hugging Face."""
    folder = find_run(Path(path).expanduser())
    if not folder.is_dir() or not is_there(folder / _CONFIG):
        return False
    kind = read_object(folder / _CONFIG).get("model_type")
    return kind is None or kind == "headcode"


def open_own_folder(path: str | Path, reads_text: bool) -> LensModel:
    folder = find_run(Path(path).expanduser())
    if read_object(folder / _CONFIG).get("model_type") == "headcode":
        from headcode.interop import HeadcodeForCausalLM

        model = HeadcodeForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        return open_own_model(model, load_tokenizer(folder) if reads_text else None)
    if "task" not in read_object(folder / _CONFIG):
        return open_own_model(load(folder))
    config = read_run_config(folder)
    if not config.task.reads_text:
        raise ValueError(
            f"{path} is a run of {config.task.name}; the lens reads texts. Codes of this run: headcode decode {path}."
        )
    return open_own_model(load(folder), tokenizer_of(folder, config))


def open_own_model(model: nn.Module, tokenizer: Any = None) -> LensModel:
    return OwnModel(next(part for part in model.modules() if isinstance(part, Transformer)), tokenizer)


class OwnModel(LensModel):
    """A Transformer of tokens; its tokenizer is headcode's or one of transformers."""

    def __init__(self, model: Transformer, tokenizer: Any) -> None:
        super().__init__()
        if model.config.vocab_size is None or model.config.cross_layers:
            raise ValueError("The lens reads a Transformer of tokens (with a vocab_size) that attends to itself.")
        self.model, self.tokenizer = model, tokenizer
        self.num_layers, self.num_heads = model.config.num_layers, model.config.num_heads
        self.vocab_size = model.config.vocab_size
        self.max_length = longest_sequence(model.config) or sys.maxsize
        self.causal = self.predicts = model.config.causal
        self._spellings: dict[int, str] = {}
        if isinstance(tokenizer, Tokenizer):
            self._spellings = {number: spelling for spelling, number in tokenizer.vocabulary.items()}
            self.specials = frozenset(self._spellings[i] for i in (tokenizer.end_token,) if i is not None)
        elif tokenizer is not None:
            self.specials = frozenset(tokenizer.all_special_tokens)

    @property
    def has_tokenizer(self) -> bool:
        return self.tokenizer is not None

    def encode(self, text: str, special: bool = True) -> list[int]:
        if isinstance(self.tokenizer, Tokenizer):
            ids: list[int] = self.tokenizer.encode([text])[0].tolist()
            return ids
        given: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return given

    def token_names(self, ids: Sequence[int]) -> list[str]:
        if self._spellings:
            return [self._spellings.get(i, str(i)) for i in ids]
        return [str(i) for i in (ids if self.tokenizer is None else self.tokenizer.convert_ids_to_tokens(list(ids)))]

    def untrained(self, seed: int) -> LensModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return OwnModel(Transformer(self.model.config).eval(), self.tokenizer)

    def run(
        self,
        batch: Batch,
        visit: Visit | None = None,
        edit: Edit | None = None,
        layers: Iterable[int] | None = None,
        answer: bool = False,
    ) -> Tensor | None:
        wanted = self.check_layers(layers)
        training = self.model.training
        attentions = [block.attention for block in self.model.layers()]
        self.model.eval()
        handles = []
        try:
            with torch.no_grad(), capture_codes(self.model) as codes:
                for attention in dict.fromkeys(attentions):
                    numbers = [number for number, each in enumerate(attentions) if each is attention]
                    watch = _Watch(self, attention, numbers, wanted, batch.lengths, codes, visit, edit)
                    attention.observers.append(watch.note)
                    handles.append((attention, watch, attention.register_forward_hook(watch.finish)))
                hidden = self.model(batch.inputs, key_padding_mask=None if batch.mask.all() else ~batch.mask)
        finally:
            self.model.train(training)
            for attention, watch, handle in handles:
                attention.observers.remove(watch.note)
                handle.remove()
        for number in wanted - {number for _, watch, _ in handles for number in watch.done}:
            self.unreadable[number] = "it keeps a state and no codes (recurrent=True)"
        if not answer:
            return None
        return last_token(hidden, batch).double().softmax(-1) if self.predicts else mean_of_tokens(hidden, batch)


class _Watch:
    """What one attention module did in its uses during a pass; layers may share it."""

    def __init__(
        self,
        model: OwnModel,
        attention: HyperAttention,
        numbers: list[int],
        wanted: set[int],
        lengths: list[int],
        codes: dict[int, Tensor],
        visit: Visit | None,
        edit: Edit | None,
    ) -> None:
        self.model, self.attention, self.numbers, self.wanted = model, attention, numbers, wanted
        self.lengths, self.codes, self.visit, self.edit = lengths, codes, visit, edit
        self.call: AttentionCall | None = None
        self.done: list[int] = []

    def note(self, call: AttentionCall) -> None:
        self.call = call

    def finish(self, module: nn.Module, arguments: Any, output: Tensor) -> Tensor | None:
        call, self.call = self.call, None
        if call is None:
            return None
        number = self.numbers[call.use]
        codes = self.codes.pop(number)  # kept by nobody
        self.done.append(number)
        if number not in self.wanted:
            return None
        if self.attention.pooling == "max":
            self.model.unreadable[number] = "it pools by the largest contribution, so its output is no sum over keys"
            return None
        layer = Layer(
            number, codes, weights_of(self.attention), arguments[0], self.lengths, output, _share(self.attention, call)
        )
        if self.visit is not None:
            self.visit(layer)
        edited = None if self.edit is None else self.edit(layer)
        return None if edited is None else output + layer.change(edited).to(output)


def weights_of(attention: HyperAttention) -> AttentionWeights:
    """The maps of a layer by head, in float64; adapters and hooks on its projections are read with them."""
    with torch.no_grad():
        value, value_bias = affine_map("value_proj", attention.value_proj, attention.context_dim)
        output, output_bias = affine_map("output_proj", attention.output_proj, attention.v_dim)
    heads = attention.num_heads
    return AttentionWeights(
        value.detach().double().unflatten(0, (heads, -1)),
        None if value_bias is None else value_bias.detach().double().unflatten(0, (heads, -1)),
        output.detach().double().unflatten(1, (heads, -1)).transpose(0, 1),
        None if output_bias is None else output_bias.detach().double(),
        attention.value_net,
    )


def _share(attention: HyperAttention, call: AttentionCall) -> Tensor | None:
    """(B, query): what the layer's pooling leaves of a sum over keys; None for the sum itself.

    Every pooling but the largest contribution divides by a number of its own for each query: it is what the op makes
    of pairs that contribute 1.
    """
    if attention.pooling == "sum":
        return None
    ones = torch.ones(len(call.q), 1, call.k.shape[2], 1, dtype=torch.double)
    inputs, options = check_call(
        AttentionInputs(call.q, call.k, call.k, call.mask),
        causal=call.causal,
        pooling=attention.pooling,
        query_offset=call.query_offset,
    )
    visible = visible_pairs(inputs, options)
    shape = (len(call.q), 1, call.q.shape[2], call.k.shape[2])
    codes = torch.ones(shape, dtype=torch.double) if visible is None else visible.expand(shape).double()
    pooled, total = (apply_codes(codes, ones, "linear", pooling, visible) for pooling in (attention.pooling, "sum"))
    return (pooled / total.clamp(min=1))[:, 0, :, 0]
