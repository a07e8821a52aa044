"""The attention backends ``mlagen_mla`` and ``mlagen_dsa`` of SGLang, whose decode calls mlagen.

SGLang finds :func:`register` by the entry point ``sglang.srt.plugins`` and uses a backend only
where ``--decode-attention-backend`` or ``--attention-backend`` names it. Written for SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Any

MLA = "mlagen_mla"
DSA = "mlagen_dsa"


def register() -> None:
    """Add the backends to SGLang's registry and to the choices of its options.

    SGLang calls it in every process; a backend itself is imported when a model runner needs it.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(MLA)(create_mla)
    register_attention_backend(DSA)(create_dsa)
    if MLA not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([MLA, DSA])
        choices.add_chunked_prefix_cache_attention_backend(MLA)


def create_mla(runner: Any) -> Any:
    """Return the backend of a model runner with MLA over block tables."""
    from mlagen.integrations.sglang.mla import backend_of

    return backend_of(runner, MLA)


def create_dsa(runner: Any) -> Any:
    """Return the backend of a model runner with MLA over top-k indices (DSA)."""
    from mlagen.integrations.sglang.dsa import backend_of

    return backend_of(runner, DSA)
