"""Models of vLLM whose layers choose their attention themselves.

They are DeepSeek-V4, V4.1, MiniMax-M3 and Qwen3.8. An entry of vLLM's registry loads vLLM's model,
and wraps what its layers have their class from. Only a server that names a backend of mlagen
imports more than that.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any

from mlagen.values import require

# The models, with the module of the layers of each.
MODELS = {
    "DeepseekV4ForCausalLM": "vllm.models.deepseek_v4.nvidia.model",
    "DeepseekV4ForConditionalGeneration": "vllm.models.deepseek_v4.nvidia.model",
    "DeepseekV41ForCausalLM": "vllm.models.deepseek_v41.nvidia.model",
    **dict.fromkeys(
        (
            *("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
            "MiniMaxM3MTP",
        ),
        "vllm.models.minimax_m3.nvidia.model",
    ),
    **dict.fromkeys(
        ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration", "Qwen4ExpMTP"),
        "vllm.models.qwen4_exp.nvidia.model",
    ),
}
_OURS, _NAME, _GQA_NAME = "MLAGEN_", "MLAGEN_MLA_SPARSE", "MLAGEN_GQA"
_OPTION = "--attention-backend"
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
        if module is None:
            if import_module("vllm.platforms").current_platform.is_cuda():
                _logger.warning("vllm: expected a module %s of the model, got none", self.layers)
            return model
        name, wrapped = _CHOICES.get(self.layers, _DSV4_CHOICE)
        choice = getattr(module, name, None)
        if choice is None:  # the model is vLLM's without an option of ours
            _logger.warning("%s: expected %s in it, got none", self.layers, name)
        elif not hasattr(choice, "__wrapped__"):
            setattr(module, name, wrapped(choice))
        return model


def _names_of(options: Any) -> set[str]:
    """Return the backends of mlagen that the options of attention name."""
    asked = [options.backend, *getattr(options, "backend_per_kind", {}).values()]
    names = {each.name for each in asked if each is not None}
    return {name for name in names if name.startswith(_OURS)}


def choosing(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return vLLM's choice of the class of layers, which gives ours where an option names it.

    It raises a ``ValueError`` if the option names another backend of mlagen, or where vLLM has
    another attention than FlashMLA's.
    """

    @wraps(theirs)
    def choose(vllm_config: Any) -> Any:
        chosen, names = theirs(vllm_config), _names_of(vllm_config.attention_config)
        if not names:
            return chosen
        rule = f"{_NAME} for DeepSeek-V4 and V4.1"
        require(names == {_NAME}, _OPTION, rule, " and ".join(sorted(names)))
        flash_mla = getattr(sys.modules[theirs.__module__], "DeepseekV4FlashMLAAttention", None)
        rule = f"{_NAME} where vLLM calls FlashMLA for DeepSeek-V4 and V4.1"
        require(chosen is flash_mla, _OPTION, rule, f"it for {chosen.__name__}")
        return import_module("mlagen.integrations.vllm.dsv4").attention_of(chosen)

    return choose


def choosing_msa(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's choice of the attention of MiniMax-M3's sparse layers, ours by the option.

    It raises a ``ValueError`` where vLLM has another attention than Triton's.
    """

    @wraps(theirs)
    def choose(**named: Any) -> Any:
        chosen = theirs(**named)
        config = import_module("vllm.config").get_current_vllm_config_or_none()
        if config is None or _GQA_NAME not in _names_of(config.attention_config):
            return chosen
        backend, impl = chosen
        is_triton = impl.__name__ == "MiniMaxM3SparseTritonImpl"
        rule = f"{_GQA_NAME} where vLLM calls Triton for the sparse layers of MiniMax-M3"
        require(is_triton, _OPTION, rule, f"it for {impl.__name__}")
        ours = import_module("mlagen.integrations.vllm.msa")
        return ours.backend_of(backend), ours.impl_of(impl)

    return choose


def choosing_qsa(theirs: Any) -> Callable[..., Any]:
    """Return what makes a layer of Qwen3.8's token-sparse attention, of our class by the option."""

    @wraps(theirs, updated=())
    def choose(*, vllm_config: Any, **named: Any) -> Any:
        made = theirs
        if _GQA_NAME in _names_of(vllm_config.attention_config):
            made = import_module("mlagen.integrations.vllm.qsa").attention_of(theirs)
        return made(vllm_config=vllm_config, **named)

    return choose


# What a module of layers has their class from, a function or the class, and what wraps it.
_DSV4_CHOICE = ("_select_dsv4_attn_cls", choosing)
_CHOICES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "vllm.models.minimax_m3.nvidia.model": ("select_main_backend_and_impl_cls", choosing_msa),
    "vllm.models.qwen4_exp.nvidia.model": ("Qwen4ExpQSAAttention", choosing_qsa),
}
