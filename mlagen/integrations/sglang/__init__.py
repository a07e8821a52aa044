"""Attention backends of SGLang whose decode calls mlagen: the names of :data:`BACKENDS`.

SGLang finds :func:`register` by the entry point ``sglang.srt.plugins`` and uses a backend only
where ``--decode-attention-backend`` or ``--attention-backend`` names it. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from importlib import import_module
from typing import Any

from mlagen.integrations.servers import registration

MHA = "mlagen_mha"
MLA = "mlagen_mla"
DSA = "mlagen_dsa"
DSV4 = "mlagen_dsv4"
BACKENDS = {MHA: "mha", MLA: "mla", DSA: "dsa", DSV4: "dsv4"}  # the module of each

# What the checks of a model's options call the backend.
_CHECKED_AS = {MHA: "trtllm_mha"}
_OPTIONS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_EXPECTED = (
    "sglang.srt.arg_groups (choices, model_hook.attention_backends_of, model_override_base."
    "register_model_override_predicate) and sglang.srt.layers.attention.attention_registry"
)
_logger = logging.getLogger("mlagen")


def register() -> None:
    """Add the backends to SGLang's registry and to the choices of its options.

    SGLang calls it in every process; a backend itself is imported when a model runner needs it.
    Where SGLang has other registries, there is one warning, and nothing is registered.
    """
    with registration("sglang", _EXPECTED) as undo:
        from sglang.srt.arg_groups import choices, model_hook
        from sglang.srt.arg_groups.model_override_base import register_model_override_predicate
        from sglang.srt.layers.attention import attention_registry as registry

        if MLA in choices.ATTENTION_BACKEND_CHOICES:
            return
        for name in BACKENDS:
            undo.callback(registry.ATTENTION_BACKENDS.pop, name, None)
            registry.register_attention_backend(name)(partial(create, name))
            undo.callback(_discard, choices.ATTENTION_BACKEND_CHOICES, name)
        choices.add_attention_backend_choices(list(BACKENDS))
        undo.callback(_discard, choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS, MLA)
        choices.add_chunked_prefix_cache_attention_backend(MLA)
        theirs = model_hook.attention_backends_of
        undo.callback(setattr, model_hook, "attention_backends_of", theirs)
        model_hook.attention_backends_of = _checked(theirs)
        missing = [
            name
            for names in (registry.ATTENTION_BACKENDS, choices.ATTENTION_BACKEND_CHOICES)
            for name in BACKENDS
            if name not in names
        ]
        if missing:
            raise LookupError(f"lists without {', '.join(missing)}")
        register_model_override_predicate(is_deepseek_v4)(options_of_deepseek_v4)


def create(name: str, runner: Any) -> Any:
    """Return the backend of a model runner."""
    return import_module(f"{__name__}.{BACKENDS[name]}").backend_of(runner, name)


def is_deepseek_v4(architecture: str) -> bool:
    """Return whether a model is a DeepSeek-V4 or V4.1, whose attention is SGLang's ``dsv4``."""
    return architecture.startswith("DeepseekV4")


def options_of_deepseek_v4(server_args: Any, hf_config: Any) -> dict[str, Any]:
    """Keep ``--attention-backend mlagen_dsv4``, for which SGLang otherwise sets ``dsv4``.

    A warning says which other names of mlagen SGLang overrides.
    """
    del hf_config
    for option in _OPTIONS:
        name = getattr(server_args, option, None)
        if name in BACKENDS and name != DSV4:
            _logger.warning(
                "--%s: expected %s for DeepSeek-V4 and V4.1, whose attention is SGLang's dsv4, "
                "got %s",
                *(option.replace("_", "-"), DSV4, name),
            )
    asked = getattr(server_args, "attention_backend", None)
    return {"attention_backend": DSV4} if asked == DSV4 else {}


def _checked(attention_backends_of: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of SGLang with names that its lists of backends for a model have.

    gpt-oss and Gemma 4 accept the backends of a list.
    """
    if not callable(attention_backends_of):
        raise TypeError("attention_backends_of is not callable")

    @wraps(attention_backends_of)
    def checked(*args: Any, **kwargs: Any) -> Any:
        names = attention_backends_of(*args, **kwargs)
        if not isinstance(names, tuple):
            return names
        return tuple(_CHECKED_AS.get(name, name) for name in names)

    return checked


def _discard(names: list[str], name: str) -> None:
    with suppress(AttributeError, LookupError, ValueError):  # of a set or a tuple too
        names.remove(name)
