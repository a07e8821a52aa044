"""What calls written for FlashInfer rely on, kept by the kernels."""

from __future__ import annotations

from tests.drop_in_semantics import DropInSemantics


class TestOnTheGpu(DropInSemantics):
    """Every promise, on a GPU."""

    device = "cuda"
