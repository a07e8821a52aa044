"""Attention backends of vLLM whose decode calls mlagen.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` and uses a backend only
where ``--attention-backend`` names it.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

from mlagen.integrations.servers import registration

BACKENDS = {
    "MLAGEN_MLA": "mlagen.integrations.vllm.dense.MlagenMLABackend",
    "MLAGEN_MLA_SPARSE": "mlagen.integrations.vllm.sparse.MlagenSparseMLABackend",
    "MLAGEN_GQA": "mlagen.integrations.vllm.gqa.MlagenGQABackend",
}
_EXPECTED = "AttentionBackendEnum.register(name, value) in vllm.v1.attention.backends.registry"


def register() -> None:
    """Add the names of :data:`BACKENDS` to vLLM's registry; their modules are imported when chosen.

    vLLM calls it in every process, whichever backend is chosen, and may do so more than once. It
    never raises: where another vLLM lacks the registry, a warning says so.
    """
    with registration("vllm", _EXPECTED) as undo:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum as Registry

        new = {name: path for name, path in BACKENDS.items() if name not in Registry.__members__}
        for name, path in new.items():
            inspect.signature(Registry.register).bind(name, path)
        for name, path in new.items():
            undo.callback(_withdraw, Registry, name)
            Registry.register(name, path)
        if missing := [name for name in new if name not in Registry.__members__]:
            raise LookupError(f"a registry without {', '.join(missing)}")
        with suppress(Exception):  # a missing warning is no reason to serve no model
            from mlagen.integrations.vllm.unserved import warn_of_deepseek_v4

            warn_of_deepseek_v4()


def _withdraw(registry: Any, name: str) -> None:
    # An enum has no public way to delete a member.
    getattr(registry, "_member_map_", registry.__members__).pop(name, None)
    with suppress(AttributeError, ValueError):
        registry._member_names_.remove(name)
    with suppress(AttributeError):
        delattr(registry, name)
