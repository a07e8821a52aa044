"""Fixtures of the tests of integrations."""

from __future__ import annotations

from tests.integrations.transformers_stand_in import integration

__all__ = ["integration"]
