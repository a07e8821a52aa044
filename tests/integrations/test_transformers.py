"""Models of transformers on the CPU; single calls are in ``test_transformers_calls.py``."""

from __future__ import annotations

from tests.transformers_semantics import ModelSemantics


class TestModels(ModelSemantics):
    """The shared tests, on the CPU."""
