"""Torch ops of planned runs: the arguments of a run, and its plan in three parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

import torch

from mlagen.families.common.arguments import require_flag
from mlagen.observe.observed import observed
from mlagen.planned.metadata import Requests
from mlagen.planned.plan import Plan
from mlagen.torch_ops.traced import Op, Shape, as_op, traceable

# The parts of a plan: the text of its settings, its tensors, and the sizes of its requests, which
# are symbols in a graph that serves several plans.
_PARTS = {
    "plan": "str",
    "layout": "list[torch.Tensor]",
    "max_kv_len": "int",
    "max_q_len": "int | None",
    "q_len": "int",
    "tokens": "int | None",
}
_SIZES = tuple(_PARTS)[2:]


class PlannedOp:
    """The op of the runs of a wrapper.

    ``launch`` computes a run from its plan, its workspace and its arguments. ``settings_of`` has
    the settings of a plan's text, and of the arguments by name where it is empty; ``output`` that
    of the arguments by name. ``names`` are the caller's of block tables, by field of the requests.
    """

    def __init__(
        self,
        name: str,
        launch: Callable[..., tuple[torch.Tensor, ...]],
        *,
        settings_of: Callable[[str, dict[str, Any]], Any],
        output: Callable[[dict[str, Any]], Shape],
        names: Mapping[str, str],
    ) -> None:
        self.name = name
        self._names = names
        parameters = inspect.signature(launch).parameters
        self._arguments = tuple(parameters)[2:]

        def entry(workspace_buffer: torch.Tensor, **given: Any) -> Any:
            text, layout = given.pop("plan"), given.pop("layout")
            sizes = {size: given.pop(size) for size in _SIZES}
            settings = settings_of(text, given)
            requests = self._bound_requests(layout)
            plan = Plan(settings=settings, text=text, requests=requests, **sizes)
            result = launch(plan, workspace_buffer, **given)
            return result[0], result[1] if len(result) > 1 else None

        kind = Parameter.POSITIONAL_OR_KEYWORD
        parts = [Parameter(part, kind, annotation=type_) for part, type_ in _PARTS.items()]
        workspace = Parameter("workspace_buffer", kind, annotation="torch.Tensor")
        own = [parameters[argument] for argument in self._arguments]
        required = [parameter for parameter in own if parameter.default is Parameter.empty]
        others = [parameter for parameter in own if parameter.default is not Parameter.empty]
        vars(entry)["__signature__"] = inspect.Signature([workspace, *required, *parts, *others])
        entry.__name__ = name
        op = Op(output=output, has_lse=True, fills_lse=True)
        self.entry = traceable(op)(observed(entry))
        self._order = (*(p.name for p in required), *_PARTS, *(p.name for p in others))

    def call(
        self, plan: Plan[Any], workspace: torch.Tensor, run: tuple[Any, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs of a run by the op; a compiler traces this."""
        given = dict(zip(self._arguments, run, strict=True))
        given["return_lse"] = require_flag(given["return_lse"], "return_lse")
        given["plan"], given["layout"] = plan.text, list(plan.tensors)
        for size in _SIZES:
            given[size] = getattr(plan, size)
        out = given["out"]
        if out is not None and not out.is_contiguous():  # Dynamo traces no op into gaps
            given["out"] = torch.empty_like(out, memory_format=torch.contiguous_format)
        result: Any = as_op(self.name, workspace, *(given[name] for name in self._order))
        result, *others = result if given["return_lse"] else (result,)
        return (result if out is given["out"] else out.copy_(result), *others)

    def _bound_requests(self, layout: Sequence[torch.Tensor]) -> Requests:
        *offsets, ids, lengths = layout
        is_dense = ids.dim() == 2
        return Requests(
            kv_indices=ids,
            kv_len_arr=lengths,
            kv_indptr=None if is_dense else offsets[-1],
            qo_indptr=offsets[0] if len(offsets) > (0 if is_dense else 1) else None,
            names=self._names if is_dense else {},
        )
