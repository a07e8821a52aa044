"""Messages of decode context parallel between the ranks of a process group."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from mlagen.families.common.arguments import require
from mlagen.families.states import States, combine_states
from mlagen.settings import current_settings
from mlagen.torch_ops.traced import is_compiling, is_traced

_LSE_BYTES = 16  # of a row in a message; keeps outputs aligned
_REJECTED = 255  # every byte of the messages of a rank that rejects its arguments


class Exchange(NamedTuple):
    """What the ranks exchange in a call, and views of it in the layouts of the kernels.

    Its memory is rank by rank and head by head, so that a message to a rank is contiguous.
    """

    gathered: torch.Tensor  # bytes [world * heads, ..., row], of all ranks; none if they are given
    query: torch.Tensor  # its view [..., world * heads, head_dim_qk]
    out: torch.Tensor  # [..., world * heads, kv_lora_rank], over the tokens of this rank
    lse: torch.Tensor  # [tokens, world * heads]
    sent: torch.Tensor  # bytes [world * heads, tokens, row]: an output row, and its LSE
    received: torch.Tensor  # the same of this rank's heads
    computed: States  # views of out and lse
    nothing: States
    messages: States  # views of sent
    first: States  # views of received: of rank 0
    others: States  # of the other ranks, [tokens, world - 1, heads, ...]

    def gather(self, query: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Return the queries of the heads of all ranks."""
        own = query.movedim(-2, 0).contiguous()
        # As bytes, since no backend has collectives of every dtype. The newer name of the same one.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(self.gathered, own.view(torch.uint8), group=group)
        return self.query

    def pack(self) -> None:
        """Copy the results over the tokens of this rank into messages."""
        by_kernel = not (is_compiling() or is_traced())
        # A copy: without other states the first one stays as it is.
        combine_states(
            self.computed, self.nothing, "base2", into=self.messages, by_kernel=by_kernel
        )

    def combine(self, base: str, group: dist.ProcessGroup | None) -> States:
        """Send each rank the results of its heads, and return those of this rank, combined.

        Raises
        ------
        ArgumentError
            If another rank rejected the call, and reading the messages waits for no GPU, or
            ``MLAGEN_CHECK=1`` allows it.
        """
        is_eager = not (is_compiling() or is_traced())
        dist.all_to_all_single(self.received, self.sent, group=group)
        if is_eager and (self.out.device.type == "cpu" or current_settings().checks_contents):
            self._require_results()
        out, lse = combine_states(self.first, self.others, base, by_kernel=is_eager)
        return States(out.view(*self.out.shape[:-2], *out.shape[1:]), lse)

    def reject(self, group: dist.ProcessGroup | None) -> None:
        """Send each rank that this one has no results: they wait for its messages.

        The message is NaN in every format, and no result of a kernel, which has another NaN.
        """
        with suppress(RuntimeError):  # the error of this rank matters more
            dist.all_to_all_single(self.received, self.sent.fill_(_REJECTED), group=group)

    def _require_results(self) -> None:
        world = 1 + self.others.out.shape[1]
        messages = self.received.view(world, self.received.numel() // world)
        rejected = (messages == _REJECTED).all(dim=1).nonzero()[:, 0].tolist()
        is_valid = not rejected or not messages.numel()  # a call of no tokens has empty messages
        require(is_valid, "group", "results of every rank", f"an error on ranks {rejected}")


def new_exchange(
    rows: tuple[int, ...],
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Exchange:
    """Return memory for queries ``[*rows, heads, head_dim_qk]``; ``sizes`` are their others."""
    heads, head_dim_qk, kv_lora_rank, world = sizes
    tokens, all_heads = math.prod(rows), world * heads
    out_dtype = dtype if dtype.itemsize == 2 else torch.bfloat16
    out_bytes = kv_lora_rank * out_dtype.itemsize
    lse_offset = -(-out_bytes // _LSE_BYTES) * _LSE_BYTES

    def empty(*shape: int, of: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device=device)

    def states(rows: torch.Tensor) -> States:
        lse = rows[..., lse_offset:].view(torch.float32)[..., 0]
        return States(rows[..., :out_bytes].view(out_dtype), lse)

    query = empty(all_heads, *rows, head_dim_qk, of=dtype)
    out = empty(*rows, all_heads, kv_lora_rank, of=out_dtype)
    lse = empty(tokens, all_heads, of=torch.float32)
    sent, received = (empty(all_heads, tokens, lse_offset + _LSE_BYTES) for _ in range(2))
    by_rank = received.view(world, heads, *received.shape[1:]).permute(2, 0, 1, 3)
    computed = States(out.view(tokens, all_heads, kv_lora_rank), lse)
    return Exchange(
        gathered=query.view(torch.uint8),
        query=query.movedim(0, -2),
        out=out,
        lse=lse,
        sent=sent,
        received=received,
        computed=computed,
        nothing=States(computed.out[:, None][:, :0], lse[:, None][:, :0]),
        messages=states(sent.transpose(0, 1)),
        first=states(by_rank[:, 0]),
        others=states(by_rank[:, 1:]),
    )
