"""FlashInfer compatibility on a GPU."""

from __future__ import annotations

from tests.drop_in_semantics import DropInSemantics


class TestDropInOnGpu(DropInSemantics):
    """Shared tests, on a GPU."""

    device = "cuda"
