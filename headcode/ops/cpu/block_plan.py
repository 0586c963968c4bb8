"""What the kernels of a fused block are to do: planned once for a block's sizes, then bound to addresses at every step.

Forward: weights are packed into panels; LayerNorm and projections; attention; everything from the heads' outputs on.
Backward: the same the other way round, each kernel followed by one that adds up what its tasks have summed.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from headcode.jit import address_of
from headcode.ops.cpu import attention as cpu
from headcode.ops.cpu.launch import Area, Place, Program, Section, Word, contiguous
from headcode.ops.options import AttentionInputs, AttentionOptions, Problem

MOST_TASKS = 16
LEAST_TOKENS = 64
"""A task with fewer tokens would spend its time on its own copy of the weights' gradients."""
PIECE = 2**13

# Areas of a call. STREAM is none: the "address" there is the dropout's stream, which differs from step to step as well.
KEPT, X, OUT, STREAM, SCRATCH, SUMS, GRAD_X, PARAMETERS = range(1, 9)


class BlockSizes(NamedTuple):
    """All that a plan depends on."""

    batch: int
    length: int
    dim: int
    qk_width: int
    v_width: int
    inner_width: int
    num_heads: int
    first: int
    """The first query; with `last`, the range whose outputs are computed."""
    last: int
    gated: bool
    has_band: bool
    epsilons: tuple[float, float]
    """Of the two LayerNorms."""
    attention: AttentionOptions
    """With dropout_seed 0: each call has its own."""

    @property
    def taken(self) -> int:
        return self.last - self.first

    @property
    def hidden_width(self) -> int:
        return 2 * self.inner_width if self.gated else self.inner_width


class Projection(NamedTuple):
    """Projections of the same tokens are one product; where few queries are read, theirs is another."""

    parts: tuple[int, ...]
    """Which of query, key and value."""
    widths: tuple[int, ...]
    chosen: bool
    """Whether of the tokens that are read alone."""

    @property
    def width(self) -> int:
        return sum(self.widths)


class BlockPlan:
    """Sections of memory and programs for one pass forward and one backward.

    The parameters stand in the order of `BlockWeights`: weight and bias of attention norm, query, key, value, output,
    feed-forward norm; hidden and inner layer; then the band's table, which no kernel reads.
    """

    def __init__(self, sizes: BlockSizes) -> None:
        self.sizes, self.options = sizes, sizes.attention
        widths = (sizes.qk_width, sizes.qk_width, sizes.v_width)
        pruned = sizes.taken != sizes.length
        groups = [((0,), True), ((1, 2), False)] if pruned else [((0, 1, 2), False)]
        self.projections = [Projection(parts, tuple(widths[i] for i in parts), chosen) for parts, chosen in groups]
        self._plan_memory()
        self.forward, self.backward = Program(), Program()
        self._plan_forward()
        self._plan_backward()

    def _plan_memory(self) -> None:
        """What is kept for the backward pass, and what only it needs."""
        sizes, kept, scratch = self.sizes, Area(KEPT), Area(SCRATCH)
        batch, taken, dim = sizes.batch, sizes.taken, sizes.dim
        self.projected, self.statistics, self.grad_projected = [], [], []
        for projection in self.projections:
            length = taken if projection.chosen else sizes.length
            self.projected.append(kept.take(batch, length, projection.width))
            self.statistics.append(kept.take(batch, length, 2))
            self.grad_projected.append(scratch.take(batch, length, projection.width))
        self.statistics.append(kept.take(batch, taken, 2))
        self.attended, self.middle = kept.take(batch, taken, sizes.v_width), kept.take(batch, taken, dim)
        self.hidden = kept.take(batch, taken, sizes.hidden_width)
        self.saved = kept.take(*cpu.saved_shape(batch, sizes.num_heads, taken, self.options.norm))
        self.band = None
        if sizes.has_band:
            self.band = kept.take(sizes.num_heads, cpu.band_length(taken, sizes.length))
        self.zeros = kept.take(max(sizes.hidden_width, dim)) if sizes.gated else None
        self.biases = [kept.take(projection.width) for projection in self.projections]
        shapes = [(projection.width, dim) for projection in self.projections]
        shapes += [(dim, sizes.v_width), (sizes.hidden_width, dim), (dim, sizes.inner_width)]
        self.panels, self.panels_back = ([kept.take(*shape) for shape in shapes] for _ in range(2))
        self.grad_middle, self.grad_attended = (
            scratch.take(batch, taken, dim),
            scratch.take(batch, taken, sizes.v_width),
        )
        self.kept, self.scratch, self.sums = kept, scratch, Area(SUMS)
        self.q, self.k, self.v = self._heads(self.projected)
        self.grad_q, self.grad_k, self.grad_v = self._heads(self.grad_projected)
        self.out_heads, self.grad_heads = (
            section.by_head(sizes.num_heads, 0, sizes.v_width) for section in (self.attended, self.grad_attended)
        )
        inputs: Any = AttentionInputs(self.q, self.k, self.v, relative_bias=self.band)  # type: ignore[arg-type]
        self.served_by_torch = cpu.prefers_torch(Problem.of(inputs, self.options))

    def _heads(self, projected: Sequence[Section]) -> tuple[Section, Section, Section]:
        """q, k and v (B, H, T, D) where the projections have them, joined or the queries apart."""
        sizes = self.sizes
        before = 0 if len(projected) > 1 else sizes.qk_width
        return (
            projected[0].by_head(sizes.num_heads, 0, sizes.qk_width),
            projected[-1].by_head(sizes.num_heads, before, sizes.qk_width),
            projected[-1].by_head(sizes.num_heads, before + sizes.qk_width, sizes.v_width),
        )

    def _plan_forward(self) -> None:
        program = self.forward
        self._plan_packing(program)
        for index, projection in enumerate(self.projections):
            self._launch(
                program,
                f"project {index}",
                "project",
                **self._tokens(projection.chosen),
                **self._norm(0, self.statistics[index]),
                width=projection.width,
                weight=self.panels[index],
                bias=self.biases[index],
                x=Place(X, 0),
                projected=self.projected[index],
            )
        if not self.served_by_torch:
            call = self._attention()
            num_tasks = call.share_out_forward()
            table = program.table(cpu.table_of((self.q, self.k, self.v, self.out_heads)))
            program.launch("attention", call.kernel("forward"), call.record(table), num_tasks)
        output, hidden, inner = self.panels[-3:]
        self._launch(
            program,
            "feed",
            "feed",
            **self._tokens(True),
            **self._norm(1, self.statistics[-1]),
            **self._widths(),
            x=Place(X, 0),
            attended=self.attended,
            middle=self.middle,
            hidden=self.hidden,
            out=Place(OUT, 0),
            output_weight=output,
            output_bias=_parameter(9),
            hidden_weight=hidden,
            hidden_bias=_parameter(13) if self.zeros is None else self.zeros,
            inner_weight=inner,
            inner_bias=_parameter(15) if self.zeros is None else self.zeros,
        )

    def _plan_packing(self, program: Program) -> None:
        """The weights as the products read them, panels for the way forward and for the way back; biases joined."""
        sizes = self.sizes
        groups = [
            [(2 + 2 * part, width) for part, width in zip(p.parts, p.widths, strict=True)] for p in self.projections
        ]
        groups += [[(8, sizes.dim)], [(12, sizes.inner_width)], [(14, sizes.dim)]]
        if sizes.gated:
            groups[-2].append((13, sizes.inner_width))
        jobs: list[Word] = []
        for group, panels, back in zip(groups, self.panels, self.panels_back, strict=True):
            depth, k = panels.shape
            first = 0
            for number, n in group:
                to = Place(KEPT, 4 * (panels.start + first * k))
                jobs += (_parameter(number), n, k, to, 0, 0, _parameter(number), n, k, back.data_ptr(), depth, first)
                first += n
        for projection, bias in zip(self.projections, self.biases, strict=True):
            at = bias.start
            for part, width in zip(projection.parts, projection.widths, strict=True):
                # A matrix of one row stays as it is.
                jobs += (_parameter(3 + 2 * part), 1, width, Place(KEPT, 4 * at), 1, 0)
                at += width
        num_jobs = len(jobs) // 6
        program.launch("pack", _kernels()["pack"], [0, num_jobs, *jobs], num_jobs)

    def _plan_backward(self) -> None:
        sizes, program, dim = self.sizes, self.backward, self.sizes.dim
        output, hidden, inner = self.panels_back[-3:]
        of_inner, of_hidden, of_output, inner_bias, output_bias, norm, norm_bias, hidden_bias = self._launch_summed(
            program,
            "feed",
            [
                *((dim, sizes.inner_width), (sizes.hidden_width, dim), (dim, sizes.v_width)),
                *((dim,), (dim,), (dim,), (dim,), (sizes.hidden_width,)),
            ],
            **self._tokens(True),
            **self._norm(1, self.statistics[-1]),
            **self._widths(),
            attended=self.attended,
            middle=self.middle,
            hidden=self.hidden,
            grad_out=Place(OUT, 0),
            grad_middle=self.grad_middle,
            grad_attended=self.grad_attended,
            output_weight=output,
            hidden_weight=hidden,
            inner_weight=inner,
        )
        if not self.served_by_torch:
            self._plan_attention_backward(program)
        norms, of_projections = [], []
        for index, projection in enumerate(self.projections):
            weight, *pair, bias = self._launch_summed(
                program,
                f"project {index}",
                [(projection.width, dim), (dim,), (dim,), (projection.width,)],
                **self._tokens(projection.chosen),
                **self._norm(0, self.statistics[index]),
                x=Place(X, 0),
                width=projection.width,
                weight=self.panels_back[index],
                grad_projected=self.grad_projected[index],
                grad_middle=self.grad_middle if index == 0 else 0,
                grad_x=Place(GRAD_X, 0),
                # First all tokens, then what the chosen ones add.
                grad_x_begun=int(index != len(self.projections) - 1),
            )
            norms.append(pair)
            for rows, numbers in zip(weight.split(projection.widths), bias.split(projection.widths), strict=True):
                of_projections += [rows, numbers]
        feed_forward = [of_hidden, hidden_bias, of_inner, inner_bias]
        if sizes.gated:
            feed_forward = [*of_hidden.split((sizes.inner_width,) * 2), of_inner]
        self.attention_norm_sums = norms
        """Weight and bias of the attention's norm, as each of the projections has it: they are yet to be added up."""
        self.gradients = [*of_projections, of_output, output_bias, norm, norm_bias, *feed_forward]
        """Of the parameters after these, but for the table."""

    def _plan_attention_backward(self, program: Program) -> None:
        call = self._attention()
        tensors = (self.q, self.k, self.v, self.out_heads, self.grad_heads, self.grad_q, self.grad_k, self.grad_v)
        table = program.table(cpu.table_of(tensors))
        self.delta = None
        if self.options.norm == "softmax":
            self.delta = self.scratch.take(*self.saved.shape)
            call.fields["delta"] = self.delta.data_ptr()
        self.needs_delta_kernel = call.needs_delta_kernel
        if self.needs_delta_kernel:
            num_tasks = call.share_out_forward()
            program.launch("delta", call.kernel("delta"), call.record(table), num_tasks)
        num_tasks, num_splits = call.share_out_backward()
        self.partial_q = self.grad_band = None
        if num_splits > 1:
            self.partial_q = self.scratch.take(*call.partial_q_shape(num_splits))
            call.fields["partial_q"] = self.partial_q.data_ptr()
        if self.band is not None:
            parts = self.scratch.take(num_tasks, *self.band.shape)
            self.grad_band = self.scratch.take(*self.band.shape)
            call.fields["partial_band"] = parts.data_ptr()
            self._sum(program, "sum of bands", parts, self.grad_band)
        program.launch("attention", call.kernel("backward"), call.record(table), num_tasks)

    def _attention(self) -> cpu.AttentionCall:
        stream: Any = Place(STREAM, 0)
        return cpu.AttentionCall(self.q, self.k, self.v, None, self.band, self.saved, self.options, stream)

    def _launch_summed(
        self, program: Program, name: str, shapes: Sequence[tuple[int, ...]], **fields: Any
    ) -> list[Section]:
        """A kernel whose tasks sum up gradients of these shapes, and the launch that adds up what they have."""
        num_tasks, _ = _share_out(fields["tokens"])
        size = sum(math.prod(shape) for shape in shapes)
        parts, total = self.scratch.take(num_tasks, size), self.sums.take(size)
        self._launch(program, name, f"{name.split()[0]}_backward", **fields, parts=parts, part_size=size)
        self._sum(program, f"sum of {name}", parts, total)
        found, start = [], total.start
        for shape in shapes:
            found.append(contiguous(SUMS, start, shape))
            start += math.prod(shape)
        return found

    def _sum(self, program: Program, name: str, parts: Section, total: Section) -> None:
        num_parts, size = parts.shape[0], parts.strides[0]
        words: list[Word] = [0, parts.data_ptr(), total.data_ptr(), num_parts, size, PIECE]
        program.launch(name, _kernels()["sum"], words, -(-size // PIECE))

    def _launch(self, program: Program, name: str, kernel: str, **fields: Any) -> None:
        num_tasks, task_tokens = _share_out(fields["tokens"])
        fields |= {"tasks": num_tasks, "task_tokens": task_tokens}
        words: list[Any] = [fields.pop(field, 0) for field in _record()]
        if fields:
            raise KeyError(f"A block's record has no {', '.join(fields)}.")
        record: list[Word] = [word.data_ptr() if isinstance(word, Section) else word for word in words]
        program.launch(name, _kernels()[kernel], record, num_tasks)

    def _tokens(self, chosen: bool) -> dict[str, int]:
        sizes = self.sizes
        taken = sizes.taken if chosen else sizes.length
        first = sizes.first if chosen else 0
        return {"tokens": sizes.batch * taken, "taken": taken, "length": sizes.length, "first": first}

    def _norm(self, index: int, statistics: Section) -> dict[str, Any]:
        return {
            "dim": self.sizes.dim,
            "statistics": statistics,
            "norm_weight": _parameter((0, 10)[index]),
            "norm_bias": _parameter((1, 11)[index]),
            "epsilon": float(self.sizes.epsilons[index]),  # a whole number would be written as one
        }

    def _widths(self) -> dict[str, int]:
        sizes = self.sizes
        return {
            "attended_width": sizes.v_width,
            "hidden_width": sizes.hidden_width,
            "inner_width": sizes.inner_width,
        }


@functools.lru_cache(maxsize=64)
def plan_block(sizes: BlockSizes) -> BlockPlan:
    """A model's blocks share their plans; training has one or two, evaluation and odd batches a few more."""
    return BlockPlan(sizes)


def _parameter(number: int) -> Place:
    return Place(PARAMETERS + number, 0)


@functools.cache
def _kernels() -> dict[str, int]:
    """Addresses of the compiled kernels."""
    from headcode.ops.cpu import block_backward, block_forward, gemm

    kernels = {
        "project": block_forward.project_kernel,
        "feed": block_forward.feed_kernel,
        "feed_backward": block_backward.feed_backward_kernel,
        "project_backward": block_backward.project_backward_kernel,
        "pack": gemm.pack_kernel,
        "sum": gemm.sum_kernel,
    }
    return {name: address_of(kernel) for name, kernel in kernels.items()}


@functools.cache
def _record() -> tuple[str, ...]:
    """The fields of the record that describes a launch, in their order."""
    from headcode.ops.cpu.block_stages import BLOCK_SPEC

    return BLOCK_SPEC.names or ()


def _share_out(tokens: int) -> tuple[int, int]:
    """How many tasks, and tokens of each. By the shape alone: threads must not change what is summed with what."""
    num_tasks = max(1, min(MOST_TASKS, tokens // LEAST_TOKENS))
    size = -(-tokens // num_tasks)
    return -(-tokens // size), size
