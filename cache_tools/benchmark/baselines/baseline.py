"""A baseline: one build of another library, and how it computes a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import torch

from mlagen.spec.dtype import DType

from ..calls import Call
from ..cases import Case
from ..inputs import Inputs


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """One build of another library."""

    name: str
    version: str  # of the package
    serves: Callable[[Case], bool]
    make: Callable[[Inputs], Call]


@dataclass(frozen=True, kw_only=True)
class SharedLibrary:
    """A shared library with torch ops in an installed package."""

    version: str  # of the package, with its name
    path: Path

    def load(self) -> None:
        """Register its ops with torch."""
        torch.ops.load_library(str(self.path))  # type: ignore[no-untyped-call]


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def shared_library(package: str, name: str) -> SharedLibrary | None:
    """Return a shared library by its path in a package, or None if it is not there."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return None
    path = Path(str(found.locate_file(name)))
    if not path.is_file():
        return None
    return SharedLibrary(version=f"{package} {found.version}", path=path)


def has_16bit_query(case: Case) -> bool:
    """Whether a case has a 16-bit query over the same dtype, or in dense GQA over e4m3."""
    if not case.dtype.is_16bit or case.is_sparse_gqa:
        return False
    if case.kv_dtype is case.dtype:
        return True
    return case.family == "gqa" and case.kv_dtype is DType.E4M3


def with_topk_as_tables(inputs: Inputs) -> Inputs:
    """Return sparse inputs as dense ones: each query token a request with pages of one token."""
    case, indices = inputs.case, inputs.topk_indices
    if indices is None:
        return inputs
    tokens, top_k = case.batch * case.q_len, case.top_k
    rows = [
        replace(keys, data=keys.data.view(-1, 1, 1, keys.data.shape[-1])) for keys in inputs.keys
    ]
    return replace(
        inputs,
        case=replace(case, batch=tokens, q_len=1, seq_len=top_k, page_size=1, top_k=0),
        queries=[query.view(tokens, 1, *query.shape[2:]) for query in inputs.queries],
        keys=rows,
        values=rows,
        block_tables=indices.view(tokens, top_k),
        seq_lens=torch.full((tokens,), top_k, dtype=torch.int32, device=indices.device),
        topk_indices=None,
    )


def block_table_of(inputs: Inputs) -> torch.Tensor:
    """Return the pages of all requests, one after another, without padding."""
    tables = [inputs.block_tables[request, :n] for request, n in enumerate(inputs.pages)]
    return torch.cat(tables)


def cu_seqlens_q_of(inputs: Inputs) -> torch.Tensor:
    """Return the offsets of the requests' query tokens."""
    case = inputs.case
    ends = torch.arange(case.batch + 1, dtype=torch.int32, device=inputs.seq_lens.device)
    return ends * case.q_len
