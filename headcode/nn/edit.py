"""Codes changed on their way from the scores to the value networks: ablation, patching, steering."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from headcode.nn.calls import CodedCall, CodedLayer
from headcode.nn.capture import find_attentions, layer_numbers

Edit = Callable[[int, Tensor], Tensor]


@contextmanager
def edit_codes(model: nn.Module, edit: Edit, *, layers: int | Sequence[int] | None = None) -> Iterator[None]:
    """Inside the `with`, chosen layers use the codes that `edit(layer, codes)` returns.

    The codes are (B, H, Tq, Tk), or (edges, H) of a HyperConv, before dropout (an edited layer has none); a layer that
    computes only some queries shows those. Differentiable. Edited layers run the readable reference, whatever their
    backend. `capture_codes` still gives the codes before the edit.

    Example:
        >>> import torch
        >>> from headcode.nn import ModelConfig, Transformer
        >>> model = Transformer(ModelConfig(input_dim=5, output_dim=1, max_length=16))
        >>> with edit_codes(model, lambda layer, codes: codes * 0, layers=[0, 1]):
        ...     _ = model(torch.randn(3, 16, 5))
    """
    attentions = find_attentions(model)
    if not attentions:
        raise ValueError(f"{type(model).__name__} has no HyperAttention layer whose codes could be edited.")
    wanted = layer_numbers(layers, len(attentions))
    taken = [attention for i, attention in enumerate(attentions) if i in wanted]
    if any(attention.editor is not None for attention in taken):
        raise ValueError("The codes of a layer are being edited already; one edit at a time.")
    editors = {
        attention: _Editor(attention, [i for i, a in enumerate(attentions) if a is attention], wanted, edit)
        for attention in dict.fromkeys(taken)
    }
    for attention, editor in editors.items():
        attention.editor = editor
    try:
        yield
    finally:
        for attention in editors:
            attention.editor = None


class _Editor:
    """Replaces codes in one layer, which a model may use several times."""

    def __init__(self, attention: CodedLayer, numbers: list[int], wanted: set[int], edit: Edit) -> None:
        self.attention, self.numbers, self.wanted, self.edit = attention, numbers, wanted, edit

    def __call__(self, call: CodedCall, v: Tensor) -> Tensor:
        layer = self.numbers[call.use]
        codes = call.codes()
        if layer in self.wanted:
            edited = self.edit(layer, codes)
            if not isinstance(edited, Tensor) or edited.shape != codes.shape:
                given = tuple(edited.shape) if isinstance(edited, Tensor) else type(edited).__name__
                raise ValueError(f"An edit must return codes of shape {tuple(codes.shape)}, got {given}.")
            codes = edited
        return self.attention.apply_codes(call, codes, v)
