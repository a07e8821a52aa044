"""Other names of a planned decode: the methods and properties that FlashInfer's wrapper has too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from mlagen.families.common.arguments import (
    canonical_scale,
    require,
    require_float32,
    require_tensor,
)
from mlagen.gqa.batch_plan import DecodePlan, GraphBuffers
from mlagen.gqa.batch_settings import reject_unserved

Both = tuple[torch.Tensor, torch.Tensor]


class DecodeAliases:
    """What :class:`mlagen.decode.BatchDecodeWithPagedKVCacheWrapper` has besides plan and run."""

    plan: Callable[..., None]
    run: Callable[..., Any]
    _workspace: torch.Tensor
    _plan: DecodePlan | None
    _buffers: GraphBuffers | None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans copy their metadata into the buffers of a captured graph."""
        return self._buffers is not None

    @property
    def use_tensor_cores(self) -> bool:
        """True: every kernel uses them."""
        return True

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Replace the scratch of later runs; the plan stays.

        Parameters
        ----------
        float_workspace_buffer : any dtype, contiguous
            The scratch, on the device of the one before. A captured graph keeps its own.
        int_workspace_buffer : any dtype
            Ignored: a plan has no schedule to store.

        Raises
        ------
        ArgumentError
            If one is no tensor, or the first is on another device.
        """
        given = require_tensor(float_workspace_buffer, "float_workspace_buffer")
        require_tensor(int_workspace_buffer, "int_workspace_buffer")
        device = self._workspace.device
        require(given.device == device, "float_workspace_buffer.device", device, given.device)
        self._workspace = given

    def begin_forward(self, *args: Any, **kwargs: Any) -> None:
        """Do what :meth:`plan` does."""
        self.plan(*args, **kwargs)

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: Any, **kwargs: Any) -> Both:
        """Do what :meth:`run` does with ``return_lse``."""
        return cast("Both", self.run(q, paged_kv_cache, return_lse=True, **kwargs))

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        pos_encoding_mode: str = "NONE",
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> torch.Tensor | Both:
        """Do what :meth:`run` does, with a softmax scale and a window of this run.

        ``sm_scale`` is ``head_dim ** -0.5`` if None, and the window unlimited if ``window_left`` is
        negative, whatever the plan says. ``rope_scale`` and ``rope_theta`` are ignored.

        Raises
        ------
        ArgumentError
            If an argument breaks a rule.
        UnsupportedError
            If a keyword requests what no kernel implements.
        """
        del rope_scale, rope_theta
        reject_unserved(
            {
                "pos_encoding_mode": (pos_encoding_mode, ("NONE",)),
                "logits_soft_cap": (logits_soft_cap, (None, 0.0)),
            }
        )
        if self._plan is not None:
            planned = self._plan.settings
            given = planned.head_dim**-0.5 if sm_scale is None else sm_scale
            scale = require_float32(given, "sm_scale")
            if scale != planned.sm_scale:
                require(planned.sm_scale != 0, "sm_scale", "0 (of plan)", scale)
                number = 1.0 if q_scale is None else canonical_scale(q_scale, "q_scale")
                q_scale = scale / planned.sm_scale * number
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        result: torch.Tensor | Both = self.run(
            q, paged_kv_cache, **scales, return_lse=return_lse, window_left=window_left
        )
        return result

    def forward_return_lse(
        self, q: torch.Tensor, paged_kv_cache: Any, *args: Any, **kwargs: Any
    ) -> Both:
        """Do what :meth:`forward` does with ``return_lse``."""
        both = self.forward(q, paged_kv_cache, *args, return_lse=True, **kwargs)
        return cast("Both", both)
