"""Attention backends of vLLM whose decode calls mlagen.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` and uses a backend only
where ``--attention-backend`` names it. Written for vLLM 0.33.
"""

from __future__ import annotations

BACKENDS = {
    "MLAGEN_MLA": "mlagen.integrations.vllm.dense.MlagenMLABackend",
    "MLAGEN_MLA_SPARSE": "mlagen.integrations.vllm.sparse.MlagenSparseMLABackend",
    "MLAGEN_GQA": "mlagen.integrations.vllm.gqa.MlagenGQABackend",
}


def register() -> None:
    """Add the names of :data:`BACKENDS` to vLLM's registry; their modules are imported when chosen.

    vLLM calls it in every process, and may do so more than once.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for name, path in BACKENDS.items():
        if name not in AttentionBackendEnum.__members__:
            AttentionBackendEnum.register(name, path)
