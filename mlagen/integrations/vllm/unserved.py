"""A warning for models whose attention vLLM chooses without ``--attention-backend``."""

from __future__ import annotations

import logging
from typing import Any

from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

from mlagen.integrations.vllm import BACKENDS

_logger = logging.getLogger("mlagen")


def warn_of_deepseek_v4() -> None:
    """Warn when DeepSeek-V4 or V4.1 is served and a backend of mlagen is asked for."""
    for architecture, config in list(MODELS_CONFIG_MAP.items()):
        if architecture.startswith("DeepseekV4") and not hasattr(config, "checked_by_vllm"):
            bases = (_WarningConfig, config)
            MODELS_CONFIG_MAP[architecture] = type(
                config.__name__, bases, {"checked_by_vllm": config}
            )


class _WarningConfig(VerifyAndUpdateConfig):
    """vLLM's check of a model's configuration, with a warning after it."""

    checked_by_vllm: type[VerifyAndUpdateConfig]

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        cls.checked_by_vllm.verify_and_update_config(vllm_config)
        attention = vllm_config.attention_config
        asked = [attention.backend, *getattr(attention, "backend_per_kind", {}).values()]
        for name in dict.fromkeys(getattr(backend, "name", None) for backend in asked):
            if name in BACKENDS:
                _logger.warning(
                    "--attention-backend %s: %s has an attention of its own, which vLLM chooses by "
                    "the GPU; mlagen has no part in DeepSeek-V4 and V4.1",
                    *(name, vllm_config.model_config.architecture),
                )
