"""A pre-norm transformer block as one autograd function, for training on a CPU: `fused_block`.

Op by op, a block reads and writes each activation a dozen times, keeps two dozen of them for the backward pass, and
spends a tenth of a small model's step in Python. Here a few kernels do it all, each on a stretch of tokens that stays
in a core's cache: LayerNorm with the projections after it; the attention op, which reads queries, keys and values
where the projection left them and writes their gradients where the projection's backward pass wants them; and
everything from the heads' outputs to the end of the block. Kept are the block's input, the projections, the heads'
outputs, the middle of the residual stream and the hidden layer before its activation. Work is cut into tasks by the
shapes alone and summed in a fixed order: results are bitwise the same for any number of threads.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headcode.ops import dropout as dropout_hash
from headcode.ops.cpu import attention as cpu
from headcode.ops.cpu.block_plan import BlockPlan, BlockSizes, plan_block
from headcode.ops.options import AttentionGradients, AttentionInputs, AttentionOptions

COLUMNS = 16
"""All widths must be multiples of it: the kernels' tiles are that wide."""


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
    attention: AttentionOptions
    differentiable: Callable[..., Tensor]
    """The same block, op by op, of x and the parameters: for gradients that are to be differentiated themselves."""


def fused_block(x: Tensor, weights: BlockWeights, call: BlockCall) -> Tensor:
    """x + attention(LN(x)) =: m, then m + feedforward(LN(m)): (B, T, dim) to (B, Tq, dim); float32, contiguous."""
    return _Block.apply(call, x, *(parameter for pair in weights for parameter in pair))


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: BlockCall, x: Tensor, *parameters: Tensor) -> Tensor:
        run = _Run(call, x, parameters)
        out, kept = run.forward()
        ctx.save_for_backward(x, *parameters, kept)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        call: BlockCall = ctx.call
        x, *parameters, kept = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return (None, *_differentiable_gradients(call, (x, *parameters), grad, needs))
        # Kernels read what is in memory: no strides, no sign that is yet to be applied.
        gradients = _Run(call, x, tuple(parameters)).backward(grad.contiguous().resolve_neg(), kept)
        return (None, *(g if need else None for g, need in zip(gradients, needs, strict=True)))


def _differentiable_gradients(
    call: BlockCall, inputs: tuple[Tensor, ...], grad: Tensor, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    out = call.differentiable(*inputs)
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needs]


class _Run:
    """One pass of a block, forward or backward."""

    def __init__(self, call: BlockCall, x: Tensor, parameters: tuple[Tensor, ...]) -> None:
        self.call, self.x, self.parameters = call, x, parameters
        self.plan = plan_block(
            BlockSizes(
                batch=x.shape[0],
                length=x.shape[1],
                dim=x.shape[2],
                qk_width=parameters[2].shape[0],
                v_width=parameters[6].shape[0],
                inner_width=parameters[14].shape[1],
                num_heads=call.num_heads,
                first=call.first,
                last=call.last,
                gated=call.gated,
                has_band=call.buckets is not None,
                epsilons=call.epsilons,
                attention=replace(call.attention, dropout_seed=0),
            )
        )
        # Read by the kernels in place of an address: see `block_plan.STREAM`.
        self.stream = dropout_hash.stream_number(call.attention.dropout_seed) if self.plan.options.dropout > 0 else 0

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output, and all that the backward pass needs besides the inputs."""
        x, plan, buckets = self.x, self.plan, self.call.buckets
        kept = x.new_empty(plan.kept.size)
        out = x.new_empty(x.shape[0], plan.sizes.taken, x.shape[2])
        if plan.band is not None and buckets is not None:
            band = plan.band.of(kept).zero_()
            band[:, 1 : 1 + len(buckets)] = self.parameters[-1].detach()[:, buckets]
        if plan.zeros is not None:
            plan.zeros.of(kept).zero_()
        program = plan.forward.bind(self._starts(kept, out, 0, 0, 0))
        program.run("pack")
        for index in range(len(plan.projections)):
            program.run(f"project {index}")
        if plan.served_by_torch:
            q, k, v, attended, saved = (t.of(kept) for t in (plan.q, plan.k, plan.v, plan.out_heads, plan.saved))
            cpu.forward(AttentionInputs(q, k, v), plan.options, out=attended, saved=saved)
        else:
            program.run("attention")
        program.run("feed")
        return out, kept

    def backward(self, grad: Tensor, kept: Tensor) -> list[Tensor]:
        """Gradients of x and of the parameters, in `fused_block`'s order."""
        x, plan = self.x, self.plan
        scratch, sums, grad_x = x.new_empty(plan.scratch.size), x.new_empty(plan.sums.size), torch.empty_like(x)
        addresses = (scratch.data_ptr(), sums.data_ptr(), grad_x.data_ptr())
        program = plan.backward.bind(self._starts(kept, grad, *addresses))
        program.run("feed")
        program.run("sum of feed")
        if plan.served_by_torch:
            _attention_backward_by_torch(plan, kept, scratch)
        else:
            if plan.delta is not None:
                products = plan.grad_heads.of(scratch) * plan.out_heads.of(kept)
                torch.sum(products, -1, out=plan.delta.of(scratch))
                if plan.needs_delta_kernel:
                    program.run("delta")
            program.run("attention")
            if plan.partial_q is not None:
                cpu.finish_queries(plan.partial_q.of(scratch), plan.grad_q.of(scratch), plan.options.scale)
        # First all tokens, then what the chosen ones add.
        for index in reversed(range(len(plan.projections))):
            program.run(f"project {index}")
            program.run(f"sum of project {index}")
        first, *others = ([section.of(sums) for section in pair] for pair in plan.attention_norm_sums)
        norm = [b + a for other in others for a, b in zip(first, other, strict=True)] or first
        gradients = [grad_x, *norm, *(section.of(sums) for section in plan.gradients)]
        if plan.band is not None:
            program.run("sum of bands")
            gradients.append(self._gradient_of_table(scratch))
        return gradients

    def _gradient_of_table(self, scratch: Tensor) -> Tensor:
        plan, buckets = self.plan, self.call.buckets
        assert plan.grad_band is not None
        assert buckets is not None
        band = plan.grad_band.of(scratch)[:, 1 : 1 + len(buckets)]
        return torch.zeros_like(self.parameters[-1], memory_format=torch.contiguous_format).index_add_(1, buckets, band)

    def _starts(self, kept: Tensor, out: Tensor, *backward: int) -> list[int]:
        """Where the areas of `block_plan` are; `out` is the output, or its gradient on the way back."""
        addresses = [kept.data_ptr(), self.x.data_ptr(), out.data_ptr(), self.stream, *backward]
        return addresses + [parameter.data_ptr() for parameter in self.parameters]


def _attention_backward_by_torch(plan: BlockPlan, kept: Tensor, scratch: Tensor) -> None:
    q, k, v, out, saved = (t.of(kept) for t in (plan.q, plan.k, plan.v, plan.out_heads, plan.saved))
    grad, *gradients = (t.of(scratch) for t in (plan.grad_heads, plan.grad_q, plan.grad_k, plan.grad_v))
    inputs, buffers = AttentionInputs(q, k, v), AttentionGradients(*gradients)
    cpu.backward(grad, inputs, plan.options, out=out, saved=saved, gradients=buffers)
