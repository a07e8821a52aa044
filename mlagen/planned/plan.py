"""The result of a plan, and its text, by which an op knows it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch

from mlagen.families.common.launchers import store_bounded
from mlagen.planned.metadata import Requests

SettingsT = TypeVar("SettingsT")

_MAX_SETTINGS = 1024
_settings: dict[str, Any] = {}  # by their text

# Of a run that a CUDA graph captures without buffers.
NO_CAPTURE = (
    "use_cuda_graph: expected True with its metadata buffers while a CUDA graph is captured, "
    "since replays read metadata that the next plan frees, got False"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan(Generic[SettingsT]):
    """What the runs of a plan share.

    ``tensors``, ``key`` and ``max_kv_len`` are the parts by which a run is replayed.
    """

    settings: SettingsT
    text: str  # of the settings
    requests: Requests  # int32 on the device of the runs
    max_kv_len: int  # tokens, exact or estimated; only split-KV scheduling depends on it
    max_q_len: int | None = None
    q_len: int = 0  # query tokens of every request; 0 if they differ or are unknown
    tokens: int | None = None  # query tokens of all requests
    tensors: tuple[torch.Tensor, ...] = field(init=False)
    key: Hashable = field(init=False)

    def __post_init__(self) -> None:
        """Split the plan as every run passes it on."""
        object.__setattr__(self, "tensors", tuple(self.requests.tensors().values()))
        object.__setattr__(self, "key", (self.text, self.max_q_len, self.q_len, self.tokens))


@lru_cache(maxsize=256)
def text_of(settings: Any) -> str:
    """Return checked settings, a frozen dataclass, as text."""
    text = json.dumps(asdict(settings), default=str)
    store_bounded(_settings, text, settings, _MAX_SETTINGS)
    return text


def settings_of(kind: Any, text: str) -> Any:
    """Return the settings of a text, of the given dataclass; a compiler traces this."""
    known = _settings.get(text)
    if known is None:  # of another process, as in a compiled package
        known = kind(**json.loads(text, object_hook=_with_dtypes))
        store_bounded(_settings, text, known, _MAX_SETTINGS)
    return known


def _with_dtypes(values: dict[str, Any]) -> dict[str, Any]:
    """Return fields whose dtypes are those of torch again."""
    return {
        name: getattr(torch, value.removeprefix("torch."))
        if isinstance(value, str) and value.startswith("torch.")
        else value
        for name, value in values.items()
    }


def with_fields(kind: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator: the last parameter, a named tuple, becomes one for each of its fields."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def spread(plan: Plan[Any], workspace: torch.Tensor, *run: Any) -> Any:
            return function(plan, workspace, kind(*run))

        own = tuple(inspect.signature(function).parameters.values())[:2]
        fields = inspect.signature(kind).parameters.values()
        vars(spread)["__signature__"] = inspect.Signature([*own, *fields])
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(spread, name, getattr(function, name))
        return spread

    return decorate
