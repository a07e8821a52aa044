"""Models of transformers on the CPU; the files beside have single calls."""

from __future__ import annotations

from tests.transformers_semantics import ModelSemantics


class TestModels(ModelSemantics):
    """The shared tests, on the CPU."""
