"""Modules in place of transformers, with the names that the integration takes from it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Patch

_OURS = "mlagen.integrations.transformers"
_PARTS = ("attention", "continuous", "latent", "steps")


class Interface:
    """A registry such as ``AttentionInterface``, whose instances share their entries."""

    entries: dict[str, Callable[..., Any]]

    @classmethod
    def register(cls, name: str, function: Callable[..., Any]) -> None:
        """Add an entry."""
        cls.entries[name] = function

    def __contains__(self, name: str) -> bool:
        return name in self.entries


class Attentions(Interface):
    """In place of ``AttentionInterface``."""

    entries: dict[str, Callable[..., Any]] = {}  # noqa: RUF012


class Masks(Interface):
    """In place of ``AttentionMaskInterface``."""

    entries: dict[str, Callable[..., Any]] = {}  # noqa: RUF012


def causal(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return which keys a query attends to."""
    return key <= query


def sdpa_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return the bool mask ``[batch, 1, q_len, kv_len]`` of causal attention behind padding."""
    queries = torch.arange(q_length)[:, None] + q_offset
    sees: torch.Tensor = torch.arange(kv_length) <= queries
    sees = sees.expand(batch_size, 1, q_length, kv_length)
    if attention_mask is None:
        return sees
    left = kv_length - attention_mask.shape[1]
    padding = torch.nn.functional.pad(attention_mask, (0, left))[:, None, None]
    both: torch.Tensor = sees & padding
    return both


def sdpa(
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by torch."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


def _stand_ins() -> dict[str, ModuleType]:
    contents: dict[str, dict[str, Any]] = {
        "transformers": {"AttentionInterface": Attentions, "__version__": "5.17.0"},
        "transformers.integrations": {},
        "transformers.integrations.sdpa_attention": {"sdpa_attention_forward": sdpa},
        "transformers.masking_utils": {
            "AttentionMaskInterface": Masks,
            "causal_mask_function": causal,
            "sdpa_mask": sdpa_mask,
        },
        "transformers.modeling_utils": {"ALL_ATTENTION_FUNCTIONS": Attentions()},
    }
    modules = {}
    for name, content in contents.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(content)
    return modules


@pytest.fixture
def integration(monkeypatch: Patch) -> Iterator[Any]:
    """Return the integration and its modules, over stand-ins, whether there is transformers or not.

    The modules that other tests import are untouched.
    """
    for name in [name for name in sys.modules if name.startswith(_OURS)]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in _stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Attentions, "entries", {"paged|sdpa": sdpa})
    monkeypatch.setattr(Masks, "entries", {})
    package = import_module(_OURS)
    parts = {name: import_module(f"{_OURS}.{name}") for name in _PARTS}
    yield SimpleNamespace(package=package, registries=(Attentions, Masks), **parts)
    for name in [name for name in sys.modules if name.startswith(_OURS)]:
        del sys.modules[name]
