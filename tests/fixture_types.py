"""Short names of pytest's fixture types."""

from __future__ import annotations

import pytest

Patch = pytest.MonkeyPatch
Log = pytest.LogCaptureFixture
