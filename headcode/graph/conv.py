"""`HyperConv`: attention on graphs whose message function is a generated network."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headcode.graph.edges import EdgeCall, kept_edges
from headcode.nn.calls import CodedLayer
from headcode.nn.checks import check_sizes, resolve_method, resolve_pooling
from headcode.nn.initialisation import reset_linear, truncated_normal_
from headcode.ops import NORMS, VALUE_NETS
from headcode.ops.options import check_dropout

try:
    from torch_geometric.nn import MessagePassing
    from torch_geometric.nn.aggr import Aggregation
    from torch_geometric.typing import OptTensor
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        'Graph layers need PyTorch Geometric, which is not installed: pip install "headcode[graph]".'
    ) from None


class HyperConv(MessagePassing, CodedLayer):
    """Graph attention in which the code of an edge configures the network that turns its source into a message.

        z[e] = norm_h(q[h, target]·(k[h, source] + k_edge[h, e]) / sqrt(Dk))       the code of edge e, H numbers
        linear value net:     y[target] = b_out + pool_e Σ_h z_h W_out[h] W_value[h] x[source]
        two-layer value net:  y[target] = b_out + pool_e (Σ_h z_h W_out[h]) φ(Σ_h z_h W_value[h] x[source])

    It is `headcode.HyperAttention` with edges in the place of all pairs: equal to it on a complete graph, and to
    PyTorch Geometric's `TransformerConv` if the method is softmax. Time and memory grow with the number of edges. A
    self-loop is an edge, edges that are there twice count twice, and a node without incoming edges gets the output
    bias.

    Args:
        dim: width of the targets' features and of the output.
        num_heads: H, the length of the code.
        method: a named (norm, value_net) pair, one of METHODS; `norm` and `value_net` override its parts. The norm
            softmax is over the edges into a node, the others are over the heads of an edge.
        pooling: any aggregation of PyTorch Geometric, by name or as a module, or a list of several, whose results the
            output projection reads side by side. Unless given, that of HyperAttention: `sum` for softmax, `mean` for
            the other norms.
        qk_dim, v_dim: total widths over all heads of queries and keys, and of values; `dim` unless given.
        context_dim: width of the sources' features, in graphs of two kinds of nodes; `dim` unless given.
        edge_dim: width of the features of edges, which are added to keys and values by projections; None if edges have
            none.
        edge_values: False lets the features of an edge act through its code alone, and not on the values.
        dropout: share of edges dropped while training.

    Example:
        >>> layer = HyperConv(16, 4, method="hyla", pooling=["sum", "max"])
        >>> edges = torch.tensor([[0, 1, 2], [1, 2, 0]])  # from 0 to 1, from 1 to 2, from 2 to 0
        >>> layer(torch.randn(3, 16), edges).shape
        torch.Size([3, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        method: str = "hyla",
        norm: str | None = None,
        value_net: str | None = None,
        pooling: str | Sequence[str] | Aggregation | None = None,
        qk_dim: int | None = None,
        v_dim: int | None = None,
        context_dim: int | None = None,
        edge_dim: int | None = None,
        edge_values: bool = True,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        qk_dim, v_dim, context_dim = (dim if width is None else width for width in (qk_dim, v_dim, context_dim))
        sizes = {"dim": dim, "num_heads": num_heads, "qk_dim": qk_dim, "v_dim": v_dim, "context_dim": context_dim}
        check_sizes(sizes if edge_dim is None else sizes | {"edge_dim": edge_dim})
        norm, value_net = resolve_method(method, norm, value_net)
        if norm != "softmax" and NORMS[norm].over == "key":
            raise ValueError(f"The only norm over the edges of a node is softmax, and {norm!r} is another one.")
        pooling = resolve_pooling(None, norm) if pooling is None else pooling
        check_dropout("dropout", dropout)
        try:
            super().__init__(aggr=pooling if isinstance(pooling, (str, Aggregation)) else list(pooling), node_dim=0)
        except (ValueError, TypeError, AttributeError, AssertionError) as error:
            raise ValueError(
                f"pooling must be an aggregation of PyTorch Geometric that needs no arguments (sum, mean, max, …), or "
                f"a list of several, got {pooling!r}: {error}"
            ) from None
        self.dim, self.context_dim, self.value_dim, self.v_dim = dim, context_dim, context_dim, v_dim
        self.num_heads = self.num_kv_heads = num_heads
        self.norm, self.value_net, self.dropout = norm, value_net, dropout
        self.num_poolings = 1 if isinstance(pooling, (str, Aggregation)) else len(pooling)

        net = VALUE_NETS[value_net]
        value_width = 2 * v_dim if net.gated else v_dim
        self.query_proj = nn.Linear(dim, qk_dim, bias=bias)
        self.key_proj = nn.Linear(context_dim, qk_dim, bias=bias)
        self.value_proj = nn.Linear(context_dim, value_width, bias=bias)
        self.edge_key_proj = None if edge_dim is None else nn.Linear(edge_dim, qk_dim, bias=False)
        self.edge_value_proj = None
        if edge_dim is not None and edge_values:
            self.edge_value_proj = nn.Linear(edge_dim, value_width, bias=False)
        self.output_proj = nn.Linear(v_dim * self.num_poolings, dim, bias=bias)
        width = v_dim // num_heads
        shape = (num_heads, width, width)
        self.register_parameter("middle_weight", nn.Parameter(torch.empty(shape)) if net.middle else None)
        middle_bias = nn.Parameter(torch.empty(shape[:2])) if net.middle and bias else None
        self.register_parameter("middle_bias", middle_bias)
        self.observers, self.editor = [], None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for linear in (self.query_proj, self.key_proj, self.value_proj, self.output_proj):
            reset_linear(linear)
        for edge_proj in (self.edge_key_proj, self.edge_value_proj):
            if edge_proj is not None:
                reset_linear(edge_proj)
        if self.middle_weight is not None:
            truncated_normal_(self.middle_weight, self.v_dim)
        if self.middle_bias is not None:
            nn.init.zeros_(self.middle_bias)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        *,
        graphs: int | None = None,
        dropout_seed: int | None = None,
        use: int = 0,
    ) -> Tensor:
        """Features of the targets (nodes, dim).

        Args:
            x: features of the nodes (nodes, dim), or a pair: of the sources (sources, context_dim) and of the targets
                (targets, dim).
            edge_index: (2, edges), the source and the target of each edge.
            edge_attr: (edges, edge_dim), if the layer was made with edge_dim.
            graphs: of nodes that are those of so many graphs of one size, with at most one edge from a node to another:
                captured and edited codes are then (graphs, H, targets, sources).
            dropout_seed: decides which edges are dropped in training; drawn from torch's generator unless given.
            use: which use of this layer in one pass it is, for models that apply a layer several times.
        """
        source, target = x if isinstance(x, (tuple, list)) else (x, x)
        self._check_inputs(source, target, edge_index, edge_attr, graphs)
        q = self.query_proj(target).unflatten(1, (self.num_heads, -1))  # (targets, H, Dk)
        k = self.key_proj(source).unflatten(1, (self.num_heads, -1))
        v = self.value_proj(source).unflatten(1, (self.num_heads, -1))
        keys = k.index_select(0, edge_index[0])  # (edges, H, Dk)
        edge_values = None
        if self.edge_key_proj is not None:
            keys = keys + self.edge_key_proj(edge_attr).unflatten(1, (self.num_heads, -1))
        if self.edge_value_proj is not None:
            edge_values = self.edge_value_proj(edge_attr).unflatten(1, (self.num_heads, -1))
        scores = (q.index_select(0, edge_index[1]) * keys).sum(-1) / math.sqrt(q.shape[2])
        sizes = (source.shape[0], target.shape[0])
        call = EdgeCall(scores, edge_index, sizes, self.norm, edge_values, graphs, use)
        for observer in self.observers:
            observer(call)
        if self.editor is not None:
            pooled = self.editor(call, v)
        else:
            pooled = self._pool(call, self._drop(call.edge_codes(), edge_index, dropout_seed), v)
        return self.output_proj(pooled)

    def apply_codes(self, call: EdgeCall, codes: Tensor, v: Tensor) -> Tensor:
        return self._pool(call, call.by_edge(codes), v)

    def _pool(self, call: EdgeCall, codes: Tensor, v: Tensor) -> Tensor:
        """The pooled messages (targets, Dv of all heads, once for each pooling), for codes (edges, H)."""
        return self.propagate(
            call.edge_index, size=call.sizes, codes=codes, values=(v, None), edge_values=call.edge_values
        )

    def message(self, codes: Tensor, values_j: Tensor, edge_values: OptTensor) -> Tensor:
        """What the network of each edge makes of its source, head by head: (edges, Dv of all heads)."""
        values = values_j if edge_values is None else values_j + edge_values  # (edges, H, Dv)
        net = VALUE_NETS[self.value_net]
        if net.activation is None:
            values = values if net.on_values is None else net.on_values(values)
            return (codes[:, :, None] * values).flatten(1)
        hidden = torch.einsum("eh,ehd->ed", codes, values)
        if net.gated:
            gate, signal = hidden.chunk(2, -1)
            hidden = net.activation(gate) * signal
        else:
            hidden = net.activation(hidden)
        if self.middle_weight is not None:
            weighed = (codes[:, :, None] * hidden[:, None]).flatten(1)  # (edges, H·Dv)
            hidden = weighed @ self.middle_weight.transpose(1, 2).flatten(0, 1)
            hidden = net.activation(hidden if self.middle_bias is None else hidden + codes @ self.middle_bias)
        return (codes[:, :, None] * hidden[:, None]).flatten(1)

    def _drop(self, codes: Tensor, edge_index: Tensor, seed: int | None) -> Tensor:
        if not self.training or self.dropout == 0:
            return codes
        seed = int(torch.randint(2**63 - 1, ())) if seed is None else seed
        return codes * kept_edges(self.dropout, seed, edge_index)[:, None] / (1 - self.dropout)

    def _check_inputs(
        self, source: Any, target: Any, edge_index: Any, edge_attr: Tensor | None, graphs: int | None
    ) -> None:
        for name, nodes, width in (("sources", source, self.context_dim), ("targets", target, self.dim)):
            if not isinstance(nodes, Tensor) or nodes.dim() != 2 or nodes.shape[1] != width:
                given = tuple(nodes.shape) if isinstance(nodes, Tensor) else type(nodes).__name__
                raise ValueError(f"The features of the {name} must have shape (nodes, {width}), got {given}.")
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided or edge_index.dtype != torch.int64:
            kind = edge_index.dtype if isinstance(edge_index, Tensor) else type(edge_index).__name__
            raise TypeError(f"edge_index must be a dense tensor of int64, got {kind}; give the (2, edges) form.")
        if edge_index.dim() != 2 or edge_index.shape[0] != 2:
            raise ValueError(
                f"edge_index must have shape (2, edges), sources and targets, got {tuple(edge_index.shape)}."
            )
        if edge_index.device.type == "cpu" and edge_index.numel() and not torch.compiler.is_compiling():
            for name, numbers, count in zip(
                ("sources", "targets"), edge_index, (len(source), len(target)), strict=True
            ):
                low, high = (int(bound) for bound in numbers.aminmax())
                if low < 0 or high >= count:
                    raise ValueError(f"edge_index names {name} {low} to {high}, and there are {count}, from 0 on.")
        wanted = None if self.edge_key_proj is None else (edge_index.shape[1], self.edge_key_proj.in_features)
        shape = None if edge_attr is None else tuple(edge_attr.shape)
        if wanted != shape:
            has = "was made without edge_dim" if wanted is None else f"needs edge_attr of shape {wanted}"
            raise ValueError(f"This layer {has}, got {'no edge_attr' if shape is None else f'edge_attr {shape}'}.")
        if graphs is not None and (graphs < 1 or len(source) % graphs or len(target) % graphs):
            raise ValueError(f"{len(source)} sources and {len(target)} targets are not those of {graphs} equal graphs.")

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, norm={self.norm!r}, value_net={self.value_net!r}"
