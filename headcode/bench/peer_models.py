"""The training steps that `headcode bench peers` compares with ours, each as a user of that library would write it.

Every peer has the model's sizes, torch's AdamW as it comes and a batch that costs nothing. Attention dropout is left
out where PyTorch's fused attention would lose its fast path by it, which is in the peer's favour.
"""

import contextlib
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headcode.bench.train import Plain
from headcode.nn import HyperAttention
from headcode.nn.position import rotate
from headcode.run import RunConfig
from headcode.tasks import Batch
from headcode.train.loss import prediction_loss


class CannotCompile(RuntimeError):
    """torch.compile does not work here; the message says why."""


class SdpaAttention(HyperAttention):
    """Softmax attention by `scaled_dot_product_attention`; the T5 band is a dense mask (H, T, T) that is learned."""

    def forward(self, query: Tensor, *arguments: Any, **options: Any) -> Tensor:
        q, k, v, _ = self._project(query, None, None, None)
        if self.position == "rotary":
            q, k = rotate(q, 0), rotate(k, 0)
        mask = None
        if self.relative_bias is not None:
            positions = torch.arange(query.shape[1])
            offsets = positions[None, :] - positions[:, None] + query.shape[1] - 1  # (T, T): k - q + T - 1
            mask = self.relative_bias(query.shape[1], query.shape[1], 0)[:, offsets]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.output_proj(out.transpose(1, 2).flatten(2))


class Sdpa(Plain):
    """Our transformer in eager PyTorch with `SdpaAttention`."""

    def __init__(self, config: RunConfig, batch: Batch) -> None:
        super().__init__(config, batch, SdpaAttention)


class Compiled(Plain):
    """`Plain` with every block under torch.compile: one layer is compiled and serves all."""

    def __init__(self, config: RunConfig, batch: Batch) -> None:
        reason = why_not_compile()
        if reason is not None:
            raise CannotCompile(reason)
        super().__init__(config, batch)
        for block in self.model.blocks:
            block.compile(fullgraph=True)  # what would fall back to eager in part is an error
        start = time.perf_counter()
        try:
            self.step()
            self.step()  # with another dropout seed: should that compile anew after all, it belongs to the price
        except RuntimeError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise CannotCompile(f"torch.compile failed: {lines[0]}") from error
        self.compile_seconds = time.perf_counter() - start


def why_not_compile() -> str | None:
    """Why torch.compile cannot work here, or None."""
    compiler = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    if shutil.which(compiler) is None:
        return f"torch.compile needs a C++ compiler, and there is no {compiler} here; install one, or name it in CXX."
    return None


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Inside the `with`, torch.compile starts from nothing compiled and an empty cache."""
    import torch.compiler.config

    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    # A constant seed would be compiled for, and every next one compiled for again.
    seeds = torch.compiler.config.patch(dynamic_sources="L['dropout_seed']")  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, seeds:
        torch.compiler.reset()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            yield
        finally:
            torch.compiler.reset()
            if before is None:
                del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            else:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


class XTransformers:
    """A model of the package x-transformers, of the same sizes.

    Puzzles get its T5 bias, which it refuses beside `flash`; language models get rotary positions. It has no linear
    attention of its own: `linear` puts the scores themselves in the place of its softmax, by `attn_custom_attn_fn`.
    """

    def __init__(self, config: RunConfig, batch: Batch, flash: bool) -> None:
        package = _x_transformers()
        model = config.model
        heads, tokens = model.num_heads, model.vocab_size is not None
        options: dict[str, Any] = {
            "dim": model.dim,
            "depth": model.num_layers,
            "heads": heads,
            "attn_dim_head": model.qk_dim // heads,
            "attn_value_dim_head": model.v_dim // heads,
            "attn_flash": flash,
            "ff_mult": model.mlp_dim / model.dim,
            "verbose": False,
        }
        if model.method == "linear":
            options["attn_custom_attn_fn"] = unnormalised
        if tokens:
            gated = {"ff_glu": True, "ff_swish": True, "ff_no_bias": True}
            rotary = {"rotary_pos_emb": True, "rotary_emb_dim": model.qk_dim // heads}
            layers = package.Decoder(**options, **gated, **rotary)
            self.model = package.TransformerWrapper(
                num_tokens=model.vocab_size, max_seq_len=model.max_length, attn_layers=layers, tie_embedding=True
            )
        else:
            length = config.task.sequence_length
            if not flash:
                options |= {"rel_pos_bias": True, "rel_pos_num_buckets": length, "rel_pos_max_distance": length}
            self.model = package.ContinuousTransformerWrapper(
                dim_in=model.input_dim, dim_out=model.output_dim, attn_layers=package.Encoder(**options)
            )
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)
        self._task, self._batch = config.task, batch

    def step(self) -> None:
        self.optimizer.zero_grad()
        prediction = self.model(self._batch.x)[:, self._task.queries]
        prediction_loss(self._task, prediction, self._batch.y).backward()
        self.optimizer.step()


def unnormalised(scores: Tensor) -> Tensor:
    """The scores as codes, with 0 where x-transformers has masked a pair by its lowest number."""
    return torch.where(scores > torch.finfo(scores.dtype).min, scores, 0.0)


def _x_transformers() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import x_transformers
    except ModuleNotFoundError as error:
        missing = "" if error.name == "x_transformers" else f" (of which {error.name} is missing)"
        raise ModuleNotFoundError(
            f"x-transformers{missing} is not installed: pip install x-transformers.", name=error.name
        ) from None
    return x_transformers
