"""Attention backends of vLLM whose decode calls mlagen.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` and uses a backend only
where ``--attention-backend`` names it.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import suppress
from functools import partial
from typing import Any

from mlagen.integrations.servers import registration

BACKENDS = {
    "MLAGEN_MLA": "mlagen.integrations.vllm.dense.MlagenMLABackend",
    "MLAGEN_MLA_SPARSE": "mlagen.integrations.vllm.sparse.MlagenSparseMLABackend",
    "MLAGEN_GQA": "mlagen.integrations.vllm.gqa.MlagenGQABackend",
}
_logger = logging.getLogger("mlagen")
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
            _warn_of_deepseek_v4()


def _withdraw(registry: Any, name: str) -> None:
    # An enum has no public way to delete a member.
    getattr(registry, "_member_map_", registry.__members__).pop(name, None)
    with suppress(AttributeError, ValueError):
        registry._member_names_.remove(name)
    with suppress(AttributeError):
        delattr(registry, name)


def _warn_of_deepseek_v4() -> None:
    """Warn when DeepSeek-V4 or V4.1, whose attention vLLM chooses, is served and we are asked."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    for architecture, config in list(MODELS_CONFIG_MAP.items()):
        if architecture.startswith("DeepseekV4") and not hasattr(config, "checked_by_vllm"):
            check = staticmethod(partial(_check_and_warn, config))
            members = {"checked_by_vllm": config, "verify_and_update_config": check}
            MODELS_CONFIG_MAP[architecture] = type(config.__name__, (config,), members)


def _check_and_warn(config: Any, vllm_config: Any) -> None:
    """Check a model's configuration as vLLM does, and warn if an option names a backend of ours."""
    config.verify_and_update_config(vllm_config)
    attention = vllm_config.attention_config
    asked = [attention.backend, *getattr(attention, "backend_per_kind", {}).values()]
    for name in dict.fromkeys(getattr(backend, "name", None) for backend in asked):
        if name in BACKENDS:
            _logger.warning(
                "--attention-backend %s: %s has an attention of its own, which vLLM chooses by "
                "the GPU; mlagen has no part in DeepSeek-V4 and V4.1",
                *(name, vllm_config.model_config.architecture),
            )
