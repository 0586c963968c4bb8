"""A pre-norm transformer block as one autograd function, for training on a CPU: `fused_block`.

Op by op, a block reads and writes each activation a dozen times, keeps two dozen of them for the backward pass, and
spends a tenth of a small model's step in Python. Here a few kernels do it all, each on a stretch of tokens that stays
in a core's cache: LayerNorm with the projections after it; the attention op, which reads queries, keys and values
where the projection left them and writes their gradients where the projection's backward pass wants them; and
everything from the heads' outputs to the end of the block. Kept are the block's input, the projections, the heads'
outputs, the middle of the residual stream and the hidden layer before its activation. Work is cut into tasks by the
shapes alone and summed in a fixed order: results are bitwise the same for any number of threads.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headcode.jit import address_of
from headcode.ops import cpu
from headcode.ops.team import run_native_in_team

COLUMNS = 16
"""All widths must be multiples of it: the kernels' tiles are that wide."""
MOST_TASKS = 16
LEAST_TOKENS = 64
"""A task with fewer tokens would spend its time on its own copy of the weights' gradients."""
PIECE = 2**13


class BlockWeights(NamedTuple):
    """The parameters of a block, in the order in which its gradients come out."""

    attention_norm: tuple[Tensor, Tensor]
    """Weight and bias, as in all pairs."""
    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    value: tuple[Tensor, Tensor]
    output: tuple[Tensor, Tensor]
    feedforward_norm: tuple[Tensor, Tensor]
    hidden: tuple[Tensor, ...]
    """Weight and bias; or gate weight and signal weight if `BlockCall.gated`."""
    inner: tuple[Tensor, ...]
    """Weight and bias of the feed-forward's second projection; or its weight alone."""
    table: tuple[Tensor, ...]
    """Of the relative bias (head, bucket), if there is one."""


class BlockCall(NamedTuple):
    """What a block is to do, besides its numbers."""

    num_heads: int
    first: int
    """The first query; with `last`, the range whose outputs are computed."""
    last: int
    gated: bool
    epsilons: tuple[float, float]
    """Of the two LayerNorms."""
    buckets: Tensor | None
    """Bucket of each entry of the relative band (Tq+Tk-1)."""
    attention: dict[str, Any]
    """Options of the attention op."""
    differentiable: Callable[..., Tensor]
    """The same block, op by op, of x and the parameters: for gradients that are to be differentiated themselves."""


def fused_block(x: Tensor, weights: BlockWeights, call: BlockCall) -> Tensor:
    """x + attention(LN(x)) =: m, then m + feedforward(LN(m)): (B, T, dim) to (B, Tq, dim); float32, contiguous."""
    return _Block.apply(call, x, *(parameter for pair in weights for parameter in pair))


def _grouped(call: BlockCall, tensors: tuple[Tensor, ...]) -> BlockWeights:
    """The flat parameters of `fused_block`, in pairs again."""
    pairs = [(tensors[i], tensors[i + 1]) for i in range(0, 14, 2)]
    rest = 15 if call.gated else 16
    return BlockWeights._make([*pairs, tensors[14:rest], tensors[rest:]])


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: BlockCall, x: Tensor, *parameters: Tensor) -> Tensor:
        weights = _grouped(call, parameters)
        run = _Run(call, x, weights)
        out, kept = run.forward()
        ctx.save_for_backward(x, *parameters, *kept)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        call: BlockCall = ctx.call
        saved = ctx.saved_tensors
        num_parameters = len(ctx.needs_input_grad) - 2
        x, parameters, kept = saved[0], saved[1 : 1 + num_parameters], saved[1 + num_parameters :]
        if torch.is_grad_enabled():
            return (None, *_differentiable_gradients(call, (x, *parameters), grad, ctx.needs_input_grad[1:]))
        run = _Run(call, x, _grouped(call, parameters))
        gradients = run.backward(grad.contiguous(), *kept)
        return (None, *(g if need else None for g, need in zip(gradients, ctx.needs_input_grad[1:], strict=True)))


def _differentiable_gradients(
    call: BlockCall, inputs: tuple[Tensor, ...], grad: Tensor, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    out = call.differentiable(*inputs)
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needs]


class _Run:
    """One pass of a block, forward or backward."""

    def __init__(self, call: BlockCall, x: Tensor, weights: BlockWeights) -> None:
        self.call, self.x, self.weights = call, x.detach(), weights
        self.batch, self.length, self.dim = x.shape
        self.taken = call.last - call.first
        self.qk_width, self.v_width = weights.query[0].shape[0], weights.value[0].shape[0]
        self.inner_width = weights.inner[0].shape[1]
        self.hidden_width = 2 * self.inner_width if call.gated else self.inner_width
        self.pruned = self.taken != self.length
        self.hidden_weights = weights.hidden if call.gated else weights.hidden[:1]
        # Projections of the same tokens are one product; where few queries are read, theirs is another.
        qkv = (weights.query, weights.key, weights.value)
        self.projections = [(qkv[:1], True), (qkv[1:], False)] if self.pruned else [(qkv, False)]

    def forward(self) -> tuple[Tensor, list[Tensor]]:
        """The output, and what the backward pass needs."""
        x, weights, dim = self.x, self.weights, self.dim
        panels, packed = self._pack()
        *projection_panels, output, hidden_panels, inner = panels
        projected, statistics = [], []
        for (group, chosen), panel in zip(self.projections, projection_panels, strict=True):
            width = sum(weight.shape[0] for weight, _ in group)
            target = x.new_empty(self.batch, self.taken if chosen else self.length, width)
            bias = torch.cat([bias.detach() for _, bias in group])
            statistics.append(x.new_empty(*target.shape[:2], 2))
            fields = self._tokens(chosen) | self._norm(weights.attention_norm, 0, statistics[-1])
            _launch("project", **fields, width=width, weight=panel, bias=bias, x=x, projected=target)
            projected.append(target)
        q, k, v = self._heads(projected)
        attended = x.new_empty(self.batch, self.taken, self.v_width)
        sums = x.new_empty(cpu.saved_shape(self.batch, self.call.num_heads, self.taken, self.call.attention["norm"]))
        buckets = self.call.buckets
        band = None if buckets is None else weights.table[0].detach()[:, buckets]
        cpu.forward(
            q, k, v, None, None, band, out=self._by_head(attended, 0, self.v_width), saved=sums, **self.call.attention
        )
        tokens = (self.batch, self.taken)
        middle, out = x.new_empty(*tokens, dim), x.new_empty(*tokens, dim)
        hidden = x.new_empty(*tokens, self.hidden_width)
        statistics.append(x.new_empty(*tokens, 2))
        zeros = x.new_zeros(max(self.hidden_width, dim)) if self.call.gated else None
        _launch(
            "feed",
            **self._tokens(True),
            **self._norm(weights.feedforward_norm, 1, statistics[-1]),
            **self._widths(),
            x=x,
            attended=attended,
            middle=middle,
            hidden=hidden,
            out=out,
            output_weight=output,
            output_bias=weights.output[1],
            hidden_weight=hidden_panels,
            hidden_bias=weights.hidden[1] if zeros is None else zeros,
            inner_weight=inner,
            inner_bias=weights.inner[1] if zeros is None else zeros,
        )
        kept = [*projected, *statistics, attended, sums, middle, hidden, packed]
        return out, kept if band is None else [*kept, band]

    def backward(self, grad: Tensor, *kept: Tensor) -> list[Tensor]:
        """Gradients of x and of the parameters, in `fused_block`'s order."""
        x, weights, dim, call = self.x, self.weights, self.dim, self.call
        count = len(self.projections)
        projected, statistics, rest = kept[:count], kept[count : 2 * count + 1], kept[2 * count + 1 :]
        attended, sums, middle, hidden, packed, *band = rest
        *projection_panels, output, hidden_panels, inner = packed.split(self._panel_sizes())
        grad_middle, grad_attended = torch.empty_like(middle), torch.empty_like(attended)
        feed_sizes = [
            *(dim * self.inner_width, self.hidden_width * dim, dim * self.v_width),
            *(dim, dim, dim, dim, self.hidden_width),
        ]
        inner_weight, hidden_weight, output_weight, inner_bias, output_bias, norm, norm_bias, hidden_bias = _summed(
            "feed_backward",
            feed_sizes,
            x,
            **self._tokens(True),
            **self._norm(weights.feedforward_norm, 1, statistics[-1]),
            **self._widths(),
            attended=attended,
            middle=middle,
            hidden=hidden,
            grad_out=grad,
            grad_middle=grad_middle,
            grad_attended=grad_attended,
            output_weight=output,
            hidden_weight=hidden_panels,
            inner_weight=inner,
        )
        grad_projected = [torch.empty_like(t) for t in projected]
        grad_q, grad_k, grad_v = self._heads(grad_projected)
        grad_band = torch.empty_like(band[0]) if band else None
        cpu.backward(
            self._by_head(grad_attended, 0, self.v_width),
            *self._heads(projected),
            None,
            None,
            band[0] if band else None,
            out=self._by_head(attended, 0, self.v_width),
            saved=sums,
            grad_q=grad_q,
            grad_k=grad_k,
            grad_v=grad_v,
            grad_bias=None,
            grad_relative_bias=grad_band,
            **call.attention,
        )
        grad_x = torch.empty_like(x)
        projection_gradients: list[Tensor] = []
        norms: list[tuple[Tensor, Tensor]] = []
        # First all tokens, then what the chosen ones add.
        for index in reversed(range(count)):
            group, chosen = self.projections[index]
            width = grad_projected[index].shape[2]
            weight, *pair, bias = _summed(
                "project_backward",
                [width * dim, dim, dim, width],
                x,
                **self._tokens(chosen),
                **self._norm(weights.attention_norm, 0, statistics[index]),
                x=x,
                width=width,
                weight=projection_panels[index],
                grad_projected=grad_projected[index],
                grad_middle=grad_middle if index == 0 else None,
                grad_x=grad_x,
                grad_x_begun=int(index != count - 1),
            )
            norms.append((pair[0], pair[1]))
            widths = [w.shape[0] for w, _ in group]
            parts = zip(weight.view(width, dim).split(widths), bias.split(widths), strict=True)
            projection_gradients[:0] = [gradient for part in parts for gradient in part]
        attention_norm = norms[0] if count == 1 else (norms[0][0] + norms[1][0], norms[0][1] + norms[1][1])
        inner_pair = [inner_weight.view(dim, -1), inner_bias]
        hidden_pair = [hidden_weight.view(self.hidden_width, dim), hidden_bias]
        if call.gated:
            hidden_pair, inner_pair = list(hidden_pair[0].chunk(2)), inner_pair[:1]
        gradients = [grad_x, *attention_norm, *projection_gradients, output_weight.view(dim, -1), output_bias]
        gradients += [norm, norm_bias, *hidden_pair, *inner_pair]
        if grad_band is not None and call.buckets is not None:
            table = torch.zeros_like(weights.table[0], memory_format=torch.contiguous_format)
            gradients.append(table.index_add_(1, call.buckets, grad_band))
        return gradients

    def _heads(self, projected: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v (B, H, T, D) where the projections have them, joined or the queries apart."""
        before = 0 if self.pruned else self.qk_width
        k, v = (
            self._by_head(projected[-1], at, w)
            for at, w in ((before, self.qk_width), (before + self.qk_width, self.v_width))
        )
        return self._by_head(projected[0], 0, self.qk_width), k, v

    def _by_head(self, t: Tensor, first: int, width: int) -> Tensor:
        """`width` columns of (B, T, …) as (B, H, T, D)."""
        batch, length, row = t.shape
        head = width // self.call.num_heads
        return t.as_strided((batch, self.call.num_heads, length, head), (length * row, head, row, 1), first)

    def _matrices(self) -> list[Sequence[Tensor]]:
        """The weights of each product, those whose outputs stand side by side together."""
        weights = self.weights
        groups: list[Sequence[Tensor]] = [[weight for weight, _ in group] for group, _ in self.projections]
        return [*groups, weights.output[:1], self.hidden_weights, weights.inner[:1]]

    def _panel_sizes(self) -> list[int]:
        return [sum(matrix.numel() for matrix in group) for group in self._matrices()]

    def _pack(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """The weights as the products read them: panels of each for the way forward, and all for the way back."""
        groups, sizes = self._matrices(), self._panel_sizes()
        panels = self.x.new_empty(2, sum(sizes))
        words, num_jobs, place = [0, 0], 0, panels.data_ptr()
        back = place + panels.stride(0) * panels.itemsize
        for group in groups:
            depth, first = sum(matrix.shape[0] for matrix in group), 0
            for matrix in group:
                address, (n, k) = matrix.data_ptr(), matrix.shape
                words += (address, n, k, place + first * k * panels.itemsize, 0, 0, address, n, k, back, depth, first)
                num_jobs, first = num_jobs + 2, first + n
            place, back = place + first * k * panels.itemsize, back + first * k * panels.itemsize
        words[1] = num_jobs
        _run("pack", np.array(words), num_jobs)
        return panels[0].split(sizes), panels[1]

    def _tokens(self, chosen: bool) -> dict[str, int]:
        taken = self.taken if chosen else self.length
        return {
            "tokens": self.batch * taken,
            "taken": taken,
            "length": self.length,
            "first": self.call.first if chosen else 0,
        }

    def _norm(self, pair: tuple[Tensor, Tensor], index: int, statistics: Tensor) -> dict[str, Any]:
        return {
            "dim": self.dim,
            "statistics": statistics,
            "norm_weight": pair[0],
            "norm_bias": pair[1],
            "epsilon": self.call.epsilons[index],
        }

    def _widths(self) -> dict[str, int]:
        return {
            "attended_width": self.v_width,
            "hidden_width": self.hidden_width,
            "inner_width": self.inner_width,
        }


@functools.cache
def _kernels() -> dict[str, int]:
    """Addresses of the compiled kernels."""
    from headcode.ops import _block_backward, _block_forward, _tiles

    kernels = {
        "project": _block_forward.project_kernel,
        "feed": _block_forward.feed_kernel,
        "feed_backward": _block_backward.feed_backward_kernel,
        "project_backward": _block_backward.project_backward_kernel,
        "pack": _tiles.pack_kernel,
        "sum": _tiles.sum_kernel,
    }
    return {name: address_of(kernel) for name, kernel in kernels.items()}


@functools.cache
def _record() -> tuple[np.dtype[Any], dict[str, int]]:
    """The record that describes a call, and which of its fields is which."""
    from headcode.ops._block_stages import BLOCK_SPEC

    return BLOCK_SPEC, {name: place for place, name in enumerate(BLOCK_SPEC.names or ())}


def _run(name: str, words: np.ndarray, num_tasks: int) -> None:
    run_native_in_team(_kernels()[name], words.ctypes.data, min(torch.get_num_threads(), num_tasks))


def _share_out(tokens: int) -> tuple[int, int]:
    """How many tasks, and tokens of each. By the shape alone: threads must not change what is summed with what."""
    num_tasks = max(1, min(MOST_TASKS, tokens // LEAST_TOKENS))
    size = -(-tokens // num_tasks)
    return -(-tokens // size), size


def _launch(name: str, **fields: Any) -> None:
    record, places = _record()
    fields["tasks"], fields["task_tokens"] = _share_out(fields["tokens"])
    values: list[Any] = [0] * len(places)
    for field, value in fields.items():
        if value is not None:
            values[places[field]] = value.data_ptr() if isinstance(value, Tensor) else value
    _run(name, np.array([tuple(values)], record), fields["tasks"])


def _summed(name: str, sizes: list[int], like: Tensor, **fields: Any) -> tuple[Tensor, ...]:
    """Launch a kernel whose tasks sum up gradients, `sizes` of them, and add up what they have."""
    num_tasks, _ = _share_out(fields["tokens"])
    size = sum(sizes)
    parts, total = like.new_empty(num_tasks, size), like.new_empty(size)
    _launch(name, **fields, parts=parts, part_size=size)
    if num_tasks == 1:
        return parts[0].split(sizes)
    words = np.array([0, parts.data_ptr(), total.data_ptr(), num_tasks, size, PIECE])
    _run("sum", words, -(-size // PIECE))
    return total.split(sizes)
