"""The edges of one call of a graph layer: their scores, their codes, and which of them dropout keeps."""

from typing import NamedTuple

from torch import Tensor

from headcode.nn.calls import Positions, resolve_positions
from headcode.ops import NORMS
from headcode.ops.dropout import KEY_FACTOR, MASK32, QUERY_FACTOR, mix, stream, threshold


class EdgeCall(NamedTuple):
    """What one call of a HyperConv knows of its edges."""

    scores: Tensor
    """(edges, H)"""
    edge_index: Tensor
    """(2, edges): the source and the target of each."""
    sizes: tuple[int, int]
    """How many sources and how many targets there are."""
    norm: str
    edge_values: Tensor | None
    """(edges, H, Dv): what the features of edges add to the values of their sources."""
    graphs: int | None
    """The nodes are those of so many graphs of one size, with at most one edge from a node to another, and codes are
    laid out as those of sequences. None: codes are by edge."""
    use: int

    def edge_codes(self) -> Tensor:
        """(edges, H)"""
        if self.norm == "softmax":
            from torch_geometric.utils import softmax

            return softmax(self.scores, self.edge_index[1], num_nodes=self.sizes[1])
        return NORMS[self.norm].function(self.scores[:, :, None, None])[:, :, 0, 0]

    def codes(self, queries: Positions = None, keys: Positions = None) -> Tensor:
        """(edges, H); of `graphs` (B, H, queries, keys), with 0 where there is no edge."""
        codes = self.edge_codes()
        if self.graphs is None:
            if queries is not None or keys is not None:
                raise ValueError(
                    "The codes of a graph are (edges, heads), in the order of its edges: leave out queries and keys, "
                    "and choose among the rows."
                )
            return codes
        graph, query, key = self._places()
        num_keys, num_queries = (size // self.graphs for size in self.sizes)
        dense = codes.new_zeros(self.graphs, num_queries, num_keys, codes.shape[1])
        dense = dense.index_put((graph, query, key), codes).permute(0, 3, 1, 2)
        if queries is not None:
            dense = dense.index_select(
                2, resolve_positions("queries", queries, num_queries, 0, num_queries, codes.device)
            )
        if keys is not None:
            dense = dense.index_select(3, resolve_positions("keys", keys, num_keys, 0, num_keys, codes.device))
        return dense

    def by_edge(self, codes: Tensor) -> Tensor:
        """Codes as `codes` lays them out, as (edges, H) again."""
        if self.graphs is None:
            return codes
        graph, query, key = self._places()
        return codes[graph, :, query, key]

    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each edge the graph, and the positions in it of the target (the query) and the source (the key)."""
        assert self.graphs is not None
        num_keys, num_queries = (size // self.graphs for size in self.sizes)
        source, target = self.edge_index
        return target // num_queries, target % num_queries, source % num_keys


def kept_edges(dropout: float, seed: int, edge_index: Tensor) -> Tensor:
    """The boolean mask (edges,) of those that dropout keeps: the hash of `headcode.ops.dropout`, target as query and
    source as key."""
    source, target = edge_index
    rows = mix((stream(seed, edge_index.device) + target * QUERY_FACTOR) & MASK32)
    return mix((rows + source * KEY_FACTOR) & MASK32) >= threshold(dropout)
