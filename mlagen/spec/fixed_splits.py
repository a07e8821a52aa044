"""Fixed splits: how batch-invariant kernels cut the KV tokens of a sequence, from its length alone.

There are three rules, as each kind of kernel pays for a split elsewhere:

- sm80: at multiples of 1024 tokens, or of twice as many until there are few enough. A kernel of its
  own combines them, from a workspace that grows with their number.
- sm90 MLA: into equally long splits, whose length times that of the sequence is constant within
  bounds. The same grid combines them, from slots that it uses again.
- sm90 GQA: into a power of two of equally long splits, so that CTAs combine those of their ranges
  in a tree: ``GqaSm90Spec.schedule_units``.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mlagen.spec.kernel import parameters

# Of sm80: tokens of a split, and how many a sequence has at most, in tiles of so many rows. Longer
# sequences have splits of more tokens: workspace and combine cost as much for each split.
SM80_SPLIT_TOKENS = 1024
SM80_MAX_SPLITS = {16: 128, 32: 64, 64: 64}

# Of the sm80 kernels, and of the one that combines their splits: how many each row has.
ROW_SPLITS_PARAMETERS = parameters("int*: row_splits")

# Of the sm90 MLA kernels: the facts of their splits, and slots in the workspace.
MLA_SM90_PARAMETERS = parameters(
    "int: min_split_blocks max_split_blocks split_product max_splits num_slots"
)


class Sm80Splits:
    """The fixed splits of an sm80 spec, with its ``variant`` and ``tile``."""

    variant: Any
    tile: Any

    @property
    def split_tokens(self) -> int:
        """Tokens of a fixed split, if the variant is batch-invariant, else 0."""
        return SM80_SPLIT_TOKENS if self.variant.batch_invariant else 0

    @property
    def max_splits(self) -> int:
        """Fixed splits of a sequence, at most."""
        return SM80_MAX_SPLITS[self.tile.block_m]


class MlaSm90Splits:
    """The fixed splits of an sm90 MLA spec, with its ``block_n`` and lists or requests."""

    # The fewest and the most tokens of a split in a request, whose product with those of the
    # request is constant in between; of one in a list; and the most splits of a request with one M
    # tile. One long request needs all SMs, and short ones come in large batches.
    request_split_tokens: ClassVar[tuple[int, int]] = (1024, 4096)
    list_split_tokens: ClassVar[tuple[int, int]] = (2048, 2048)
    split_product: ClassVar[int] = 1 << 25
    max_splits: ClassVar[int] = 128

    block_n: ClassVar[int]
    is_sparse: Any

    @property
    def split_facts(self) -> dict[str, int]:
        """The kernel arguments of fixed splits, in KV blocks, without their numbers."""
        tokens = self.list_split_tokens if self.is_sparse else self.request_split_tokens
        return {
            "min_split_blocks": tokens[0] // self.block_n,
            "max_split_blocks": tokens[1] // self.block_n,
            "split_product": self.split_product // self.block_n**2,
        }

    def max_splits_of(self, m_tiles: int) -> int:
        """Return the most fixed splits of a request, or list: its M tiles share the SMs."""
        return max(1, self.max_splits // m_tiles)

    def splits_of(self, tokens: int, m_tiles: int) -> int:
        """Return the most fixed splits of a request, or list, of up to ``tokens`` tokens."""
        facts = self.split_facts
        blocks = max(1, -(-tokens // self.block_n))
        wanted = max(facts["split_product"] // blocks, facts["min_split_blocks"])
        split_blocks = min(wanted, facts["max_split_blocks"])
        return min(-(-blocks // split_blocks), self.max_splits_of(m_tiles))
