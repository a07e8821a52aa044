"""Attention backends of vLLM whose decode calls mlagen.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` and uses a backend only
where ``--attention-backend`` names it.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

from mlagen.integrations.servers import registration
from mlagen.integrations.vllm.models import MODELS, Model

BACKENDS = {
    "MLAGEN_MLA": "mlagen.integrations.vllm.dense.MlagenMLABackend",
    "MLAGEN_MLA_SPARSE": "mlagen.integrations.vllm.sparse.MlagenSparseMLABackend",
    "MLAGEN_GQA": "mlagen.integrations.vllm.gqa.MlagenGQABackend",
    "MLAGEN_GQA_TOKEN_SCALES": "mlagen.integrations.vllm.token_scales.MlagenTokenScalesBackend",
    "MLAGEN_GQA_DIFFKV": "mlagen.integrations.vllm.diffkv.MlagenDiffKVBackend",
}
_EXPECTED = (
    "AttentionBackendEnum.register(name, value) in vllm.v1.attention.backends.registry and "
    "ModelRegistry.models in vllm.model_executor.models.registry"
)


def register() -> None:
    """Add the names of :data:`BACKENDS` to vLLM's registry; their modules are imported when chosen.

    The registry of models keeps vLLM's DeepSeek-V4, whose layers then know one of the names.

    vLLM calls it in every process, whichever backend is chosen, and may do so more than once. It
    never raises: where another vLLM lacks the registry, a warning says so.
    """
    with registration("vllm", _EXPECTED) as undo:
        from vllm.model_executor.models.registry import ModelRegistry
        from vllm.v1.attention.backends.registry import AttentionBackendEnum as Registry

        new = {name: path for name, path in BACKENDS.items() if name not in Registry.__members__}
        for name, path in new.items():
            inspect.signature(Registry.register).bind(name, path)
        for name, path in new.items():
            undo.callback(_withdraw, Registry, name)
            Registry.register(name, path)
        if missing := [name for name in new if name not in Registry.__members__]:
            raise LookupError(f"a registry without {', '.join(missing)}")
        models = ModelRegistry.models
        for name in MODELS.keys() & models:
            if not isinstance(models[name], Model):
                undo.callback(models.__setitem__, name, models[name])
                models[name] = Model(models[name], MODELS[name])


def _withdraw(registry: Any, name: str) -> None:
    # An enum has no public way to delete a member.
    getattr(registry, "_member_map_", registry.__members__).pop(name, None)
    with suppress(AttributeError, ValueError):
        registry._member_names_.remove(name)
    with suppress(AttributeError):
        delattr(registry, name)
