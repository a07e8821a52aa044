"""The tests that every device runs, on a GPU."""

from __future__ import annotations

import pytest

from tests.problems.entry_points import compute, decode_gqa
from tests.problems.gqa import GqaCase
from tests.problems.gqa_cases import LONG_CASES as LONG_GQA_CASES
from tests.problems.mla import MlaCase
from tests.problems.mla_cases import LONG_CASES
from tests.test_batch_decode import TestBatchDecode
from tests.test_batch_mla import TestBatchMla
from tests.test_cascade import TestCascade
from tests.test_dcp import TestDcp
from tests.test_drop_in import TestDropIn
from tests.test_dsv4 import TestDsv4, TestDsv41
from tests.test_entry_points import TestEntryPoints
from tests.test_flare import TestFlare
from tests.test_float64 import TestFloat64
from tests.test_gqa import TestGqa
from tests.test_keywords import TestKeywords
from tests.test_masked_tokens import TestMaskedTokens
from tests.test_mla import TestMla
from tests.test_packed_rows import TestPackedRows
from tests.test_wrappers import TestWrappers

__all__ = [
    "TestBatchDecode",
    "TestBatchMla",
    "TestCascade",
    "TestDcp",
    "TestDropIn",
    "TestDsv4",
    "TestDsv41",
    "TestEntryPoints",
    "TestFlare",
    "TestFloat64",
    "TestGqa",
    "TestKeywords",
    "TestMaskedTokens",
    "TestMla",
    "TestPackedRows",
    "TestWrappers",
]


@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_long_mla(case: MlaCase) -> None:
    """Output and LSE of long sequences are right."""
    problem = case.build("cuda")

    problem.check(*compute(problem))


@pytest.mark.parametrize("case", LONG_GQA_CASES, ids=str)
def test_long_gqa(case: GqaCase) -> None:
    """Outputs of long sequences are right."""
    problem = case.build("cuda")

    problem.check(decode_gqa(problem))
