"""Problems of block-sparse and token-sparse grouped-query decode, and their float64 results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import mlagen
from tests.problems.gqa import DEVIATION, STORES, Content, GqaCase, Store
from tests.problems.problem import INVALID_IDS, Case, Problem
from tests.problems.reference import UNIT_ROUNDOFF, Attention, attend, joined

_BLOCKS = {"msa": 128, "qsa": 1}  # tokens that an index names
_POISON = {2: -1, 1: 0x7F}  # by element size: NaN, or a large number of int8


@dataclass(frozen=True, kw_only=True)
class SparseCase(Case):
    """The facts of a problem of ``msa_sparse_decode_attention`` or ``qsa_sparse_paged_attention``.

    Sequences of ``qsa`` have no query tokens of their own: ``requests`` names that of each.
    """

    kind: str = "msa"
    page_size: int = 128
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    kv: str = "16-bit"
    num_indices: int = 4
    indices: str = "mixed"  # or "valid", "-1", "invalid", "twice", "own missing", "last"
    counts: tuple[int, ...] = ()  # valid indices of each query token of qsa, as given
    requests: tuple[int, ...] = ()  # of each query token of qsa
    gate: bool = False
    is_packed: bool = False  # a key and a value in each row
    has_pages: bool = True  # or page ids outside of the cache in every second column
    spare_pages: int = 0

    @property
    def lens(self) -> tuple[int, ...]:
        """Query tokens of each sequence."""
        return (self.q_len,) * len(self.seq_lens) if self.kind == "msa" else ()

    @property
    def tokens(self) -> int:
        """Query tokens of all sequences."""
        return sum(self.lens) if self.kind == "msa" else len(self.requests)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        """The factor of the scores besides that of the head dim."""
        return 1 / DEVIATION[self.kv]

    def build(self, device: str) -> SparseProblem:
        """Return the tensors on ``device`` and the data for checking a result."""
        return _build(self, device)


@dataclass(frozen=True, kw_only=True)
class SparseProblem(Problem):
    """The tensors of a case, and the tokens of each sequence in order."""

    case: SparseCase
    store: Store
    indices: torch.Tensor  # [kv_heads, tokens, n], or [tokens, n + 1]
    gates: torch.Tensor | None
    contents: list[Content] = field(repr=False)

    @property
    def math_dtype(self) -> torch.dtype:
        """The dtype of the query."""
        return self.case.dtype

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of the query."""
        return self.case.dtype

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the query."""
        return tuple(self.query.shape)

    def poison(self, seq: int, position: int) -> None:
        """Not of this problem: all that no index names is NaN."""
        raise NotImplementedError

    def sees(self, seq: int, index: int, position: int) -> bool:
        """Return whether a query token attends to a position, in any KV head."""
        token = sum(self.case.lens[:seq]) + index
        return any(position in self.positions(token, head) for head in range(self.case.kv_heads))

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Return the keyword arguments of the entry point."""
        case, store = self.case, self.store
        key, value = store.key, store.value
        if case.is_packed:
            both = torch.cat([key, value], dim=-1)
            key, value = both[..., : case.head_dim], both[..., case.head_dim :]
        if case.kind == "msa":
            return {
                "q": self.query,
                "k": key.transpose(1, 2),
                "v": value.transpose(1, 2),
                "q2k_indices": self.indices,
                "page_table": self.block_tables,
                "seqused_k": self.seq_lens,
                "seqlen_q": case.q_len,
                "k_global_scale": case.scale,
                "v_global_scale": case.output_scale,
            } | changes
        return {
            "q": self.query,
            "k_cache": key,
            "v_cache": value,
            "logical_indices": self.indices,
            "block_table": self.block_tables,
            "token_to_req": torch.tensor(case.requests, dtype=torch.int32, device=self.device),
            "use_prefill_config": False,
            "k_scale": case.scale,
            "v_scale": case.output_scale,
            "output_gate": self.gates,
            "k_sf": store.key_scale,
            "v_sf": store.value_scale,
        } | changes

    def positions(self, token: int, head: int) -> list[int]:
        """Return the positions that the heads of a KV head attend to, in the order of the list."""
        case = self.case
        if case.kind == "msa":
            seq, draft = divmod(token, case.q_len)
            end = case.seq_lens[seq] - case.q_len + draft + 1
            given = self.indices[head, token].tolist()
        else:
            seq = case.requests[token]
            if not 0 <= seq < len(case.seq_lens):
                return []
            end = self.block_tables.shape[1] * case.page_size
            *given, count = self.indices[token].tolist()
            given = given[: max(count, 0)]
        block, table = _BLOCKS[case.kind], self.block_tables[seq].tolist()
        named = (each * block + i for each in given if each >= 0 for i in range(block))
        pages = range(len(self.store.key))
        return [at for at in named if at < end and table[at // case.page_size] in pages]

    def expected(self) -> Attention:
        """Return the float64 result: out ``[tokens, heads, head_dim]``."""
        case = self.case
        rows = self.query.cpu().view(-1, case.kv_heads, case.group, case.head_dim)
        parts = []
        for token in range(case.tokens):
            seq = token // case.q_len if case.kind == "msa" else case.requests[token]
            heads = []
            for head in range(case.kv_heads):
                positions = torch.tensor(self.positions(token, head), dtype=torch.long)
                content = self.contents[seq if len(positions) else 0]
                heads.append(
                    attend(
                        rows[token, head],
                        content.keys[positions, head],
                        content.values[positions, head],
                        score_scale=case.scale * case.head_dim**-0.5,
                        output_scale=case.output_scale,
                    )
                )
            parts.append(joined(heads, torch.cat))
        return _gated(joined(parts), self.gates)


def _gated(result: Attention, gates: torch.Tensor | None) -> Attention:
    """Return the result of a gated output, which is rounded once more."""
    if gates is None:
        return result
    factors = torch.sigmoid(gates.cpu().double())
    names = ("out", "spread", "magnitude", "small", "rounding")
    scaled = {name: getattr(result, name) * factors for name in names}
    scaled["rounding"] += UNIT_ROUNDOFF[gates.dtype] * scaled["out"].abs() + 2.0**-20
    return replace(result, **scaled)


def decode_sparse(problem: SparseProblem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and natural LSE of the entry point of a problem."""
    if problem.case.kind == "msa":
        arguments = problem.arguments(return_softmax_lse=True) | changes
        result = mlagen.msa_ops.msa_sparse_decode_attention(**arguments)
    else:
        arguments = problem.arguments(return_lse=True, return_lse_base="basee") | changes
        result = mlagen.sparse.qsa_sparse_paged_attention(**arguments)
    assert isinstance(result, tuple)
    return result


def _build(case: SparseCase, device: str) -> SparseProblem:
    generator = torch.Generator().manual_seed(case.seed)
    facts = {name: getattr(case, name) for name in ("kv_heads", "group", "head_dim", "kv", "dtype")}
    of_store = GqaCase(seq_lens=case.seq_lens, page_size=case.page_size, **facts)
    used = case.page_counts
    pages = sum(used) + 2  # some are unused
    store = STORES[case.kv](of_store, pages)
    order = torch.randperm(pages, generator=generator)
    width = max(*used, 1) + case.spare_pages
    tables = torch.tensor(INVALID_IDS).repeat(len(used), width)[:, :width].to(torch.int32)
    contents = []
    for seq, (length, count) in enumerate(zip(case.seq_lens, used, strict=True)):
        ids, order = order[:count], order[count:]
        contents.append(store.fill(ids, ids, length, generator))
        tables[seq, :count] = ids.to(torch.int32)
        if not case.has_pages:
            tables[seq, 1::2] = -1
            tables[seq, 3::4] = pages
    query = torch.randn(case.tokens, case.heads, case.head_dim, generator=generator)
    gates = torch.randn(query.shape, generator=generator) * 2 if case.gate else None
    problem = SparseProblem(
        case=case,
        query=query.to(case.dtype).to(device),
        store=store,
        block_tables=tables.to(device),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32).to(device),
        sinks=None,
        cum_seq_lens_q=None,
        indices=_indices(case, generator),
        gates=None if gates is None else gates.to(case.dtype).to(device),
        contents=contents,
    )
    _poison(problem)
    indices = problem.indices
    if case.kind == "msa":  # a view with other strides, as servers pass it
        wide = torch.full((case.tokens, case.kv_heads, case.num_indices + 3), -7).to(torch.int32)
        wide[..., : case.num_indices] = indices.transpose(0, 1)
        indices = wide.to(device).transpose(0, 1)[..., : case.num_indices]
    return replace(problem, store=store.to(device), indices=indices.to(device))


def _indices(case: SparseCase, generator: torch.Generator) -> torch.Tensor:
    """Return the indices of every query token."""
    rows = list(_rows_of_indices(case, generator))
    if case.kind == "msa":
        return torch.stack(rows).view(case.tokens, case.kv_heads, -1).transpose(0, 1).contiguous()
    counts = case.counts or (case.num_indices,) * case.tokens
    return torch.cat([torch.stack(rows), torch.tensor(counts)[:, None]], dim=1).to(torch.int32)


def _rows_of_indices(case: SparseCase, generator: torch.Generator) -> Iterator[torch.Tensor]:
    for token in range(case.tokens):
        seq = token // case.q_len if case.kind == "msa" else case.requests[token]
        length = case.seq_lens[seq] if 0 <= seq < len(case.seq_lens) else 7
        last = length - 1
        if case.kind == "msa":
            last = (length - case.q_len + token % case.q_len) // 128
        for _ in range(case.kv_heads if case.kind == "msa" else 1):
            yield _row_of_indices(case, last, generator).to(torch.int32)


def _row_of_indices(case: SparseCase, last: int, generator: torch.Generator) -> torch.Tensor:
    """Return the indices of a query token, of which ``last`` is the largest that it may have."""
    n = case.num_indices
    row = torch.full((n,), -1)
    if case.indices == "-1":
        return row
    if case.indices == "invalid":
        wild = torch.tensor([*INVALID_IDS, -2, 2**24, 2**31 - 128])
        return wild[torch.randint(0, len(wild), (n,), generator=generator)]
    if case.indices == "twice":
        return torch.randint(0, max(last, 0) + 1, (1,), generator=generator).repeat(n)
    known = torch.randperm(max(last + 1, 0), generator=generator)[:n]
    if case.indices == "own missing":
        known = known[known != last]
    if case.indices == "last" and last >= 0:
        known = torch.tensor([last])
    places = torch.randperm(n, generator=generator)
    if case.indices in {"mixed", "last"}:
        known = known[: max(1, n * 3 // 4)]
        if case.kind == "msa":  # beyond the visible blocks
            row[places[len(known) :]] = max(last, -1) + 1
        row[places[-1]] = -1
        row[places[: len(known)]] = known
        return row
    row[: len(known)] = known  # with -1 behind
    return row


def _poison(problem: SparseProblem) -> None:
    """Make all NaN that no query token attends to."""
    case, store = problem.case, problem.store
    is_named = torch.zeros(store.key.shape[:3], dtype=torch.bool)
    for token in range(case.tokens):
        seq = token // case.q_len if case.kind == "msa" else case.requests[token]
        for head in range(case.kv_heads):
            for position in problem.positions(token, head):
                page, slot = problem.slot(seq, position)
                is_named[page, slot, head] = True
    scales = (store.key_scale, store.value_scale)
    for part in (store.key, store.value) if scales[0] is None else scales:
        assert part is not None
        bits = part.view(torch.int16 if part.element_size() == 2 else torch.uint8)
        bits[~is_named] = _POISON[part.element_size()]
