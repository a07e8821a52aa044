"""DeepSeek-V4 and V4.1 in vLLM, whose layers choose their attention themselves.

An entry of vLLM's registry loads vLLM's model, and wraps the function beside its layers that
chooses their class. Only a server that names a backend of mlagen imports more than that.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any

# The models, with the module of the layers of each.
MODELS = {
    "DeepseekV4ForCausalLM": "vllm.models.deepseek_v4.nvidia.model",
    "DeepseekV4ForConditionalGeneration": "vllm.models.deepseek_v4.nvidia.model",
    "DeepseekV41ForCausalLM": "vllm.models.deepseek_v41.nvidia.model",
}
_CHOICE = "_select_dsv4_attn_cls"
_OURS, _NAME = "MLAGEN_", "MLAGEN_MLA_SPARSE"
_logger = logging.getLogger("mlagen")


@dataclass(frozen=True)
class Model:
    """An entry of vLLM's registry of models, in the place of vLLM's own."""

    theirs: Any
    layers: str  # a module, which other platforms than CUDA do not import

    def inspect_model_cls(self) -> Any:
        """Return what vLLM knows of the model."""
        return self.theirs.inspect_model_cls()

    def load_model_cls(self) -> Any:
        """Return the class of the model, whose layers have mlagen's decode if an option says so."""
        model = self.theirs.load_model_cls()
        module = sys.modules.get(self.layers)
        if module is not None:
            choice = getattr(module, _CHOICE, None)
            if choice is None:  # the model is vLLM's without an option of ours
                _logger.warning("%s: expected %s in it, got none", self.layers, _CHOICE)
            elif not hasattr(choice, "__wrapped__"):
                setattr(module, _CHOICE, choosing(choice))
        return model


def choosing(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return vLLM's choice of the class of layers, which gives ours where an option names it.

    It raises a ``ValueError`` if the option names another backend of mlagen, or where vLLM has
    another attention than FlashMLA's.
    """

    @wraps(theirs)
    def choose(vllm_config: Any) -> Any:
        chosen, options = theirs(vllm_config), vllm_config.attention_config
        asked = [options.backend, *getattr(options, "backend_per_kind", {}).values()]
        names = {each.name for each in asked if each is not None}
        names = {name for name in names if name.startswith(_OURS)}
        if not names:
            return chosen
        if names != {_NAME}:
            raise ValueError(
                f"--attention-backend: expected {_NAME} for DeepSeek-V4 and V4.1, got "
                f"{' and '.join(sorted(names))}"
            )
        flash_mla = getattr(sys.modules[theirs.__module__], "DeepseekV4FlashMLAAttention", None)
        if chosen is not flash_mla:
            raise ValueError(
                f"--attention-backend: expected {_NAME} where vLLM calls FlashMLA for DeepSeek-V4 "
                f"and V4.1, got it for {chosen.__name__}"
            )
        return import_module("mlagen.integrations.vllm.dsv4").attention_of(chosen)

    return choose
