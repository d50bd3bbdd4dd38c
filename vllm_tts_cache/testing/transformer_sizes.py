"""The sizes that any stack of decoder layers has."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSizes:
    """One stack of decoder layers."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
