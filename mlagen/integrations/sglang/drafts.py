"""Backends of draft models, which SGLang makes by a list of names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
# SGLang's name of each of our backends, and the class of ours.
_served: dict[str, tuple[str, type]] = {}


def serve_drafts(name: str, like: str, backend: type) -> None:
    """Make SGLang accept a backend for draft models, where ``like`` is its own one."""
    if not _served:
        HookRegistry.register(_FACTORY, create_backend, HookType.AROUND)
        HookRegistry.apply_hooks()
    _served[name] = (like, backend)


def create_backend(
    theirs: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: dict[str, Callable[[], Any]],
    *args: Any,
    **keywords: Any,
) -> Any:
    """Call a method of SGLang's factory with our names in ``backend_map``, its list of names."""
    ours = {
        name: partial(_create, name, backend, backend_map[like])
        for name, (like, backend) in _served.items()
    }
    return theirs(factory, backend_name, backend_map | ours, *args, **keywords)


def _create(name: str, backend: type, create: Callable[[], Any]) -> tuple[str, Any]:
    """Return what SGLang creates, with our kernels in it, or in each of its steps.

    Its constructors of the steps name their class.
    """
    _, made = create()
    for each in getattr(made, "attn_backends", [made]):
        each.__class__ = backend
    return name, made
