"""Cases and recorded launches of the tests of MLA launches."""

from __future__ import annotations

import pytest
import torch

from tests.families.launches import Launch, record_launches
from tests.problems.mla import MlaCase

UNIFORM = MlaCase(name="", seq_lens=(70, 3), heads=16, with_sinks=True)
RAGGED = MlaCase(name="", seq_lens=(70, 3), q_lens=(1, 4), heads=16)
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Record launches."""
    return record_launches(monkeypatch)
