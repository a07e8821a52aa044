"""The attention backend ``mlagen_mla`` of SGLang, whose MLA decode calls mlagen.

SGLang finds :func:`register` by the entry point ``sglang.srt.plugins`` and uses the backend only
where ``--decode-attention-backend`` or ``--attention-backend`` names it. Written for SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Any

NAME = "mlagen_mla"


def register() -> None:
    """Add the backend to SGLang's registry and to the choices of its options.

    SGLang calls it in every process; the backend itself is imported when a model runner needs it.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(create)
    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
        choices.add_chunked_prefix_cache_attention_backend(NAME)


def create(runner: Any) -> Any:
    """Return the backend of a model runner."""
    from mlagen.integrations.sglang.mla import backend_of

    return backend_of(runner, NAME)
