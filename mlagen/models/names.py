"""Model presets: names, aliases and Hub ids."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

# Models with the attention of a preset, by Hub name without the suffixes below. The first string is
# their owner on the Hub.
_ALIASES = {
    "deepseek-v2": ("deepseek-ai", "deepseek-v2.5", "deepseek-coder-v2"),
    "deepseek-v2-lite": ("deepseek-ai", "deepseek-coder-v2-lite"),
    "deepseek-v3": (
        "deepseek-ai",
        "deepseek-r1",
        "deepseek-r1-zero",
        "deepseek-v3.1",
        "deepseek-v3.1-terminus",
    ),
    "deepseek-v3.2": ("deepseek-ai", "deepseek-v3.2-exp", "deepseek-v3.2-speciale"),
    "glm-4.7-flash": ("zai-org",),
    "glm-5": ("zai-org", "glm-5.1"),
    "glm-5.3-flash": ("zai-org",),
    "gpt-oss-120b": ("openai", "gpt-oss-20b"),
    "kimi-k2": ("moonshotai", "kimi-k2.5"),
    "llama-3-8b": ("meta-llama", "llama-3.1-8b", "meta-llama-3-8b", "meta-llama-3.1-8b"),
    "llama-3-70b": (
        "meta-llama",
        "llama-3.1-70b",
        "llama-3.3-70b",
        "meta-llama-3-70b",
        "meta-llama-3.1-70b",
    ),
    "qwen3-32b": ("qwen",),
}
# Suffixes of fine-tuned or quantized variants, which have the same attention.
_SUFFIX = re.compile(r"-(instruct|base|chat|thinking|fp8|bf16|hf|\d{4})$")


@cache
def preset_names() -> tuple[str, ...]:
    """Return the names of the presets."""
    files = resources.files("mlagen.models").iterdir()
    return tuple(sorted(file.name[:-5] for file in files if file.name.endswith(".json")))


@cache
def known_names() -> tuple[str, ...]:
    """Return the names and aliases of the presets."""
    aliases = {alias for _, *others in _ALIASES.values() for alias in others}
    return tuple(sorted({*preset_names(), *aliases}))


def preset_of(name: str) -> str | None:
    """Return the preset of a name, an alias or a Hub id, or None.

    The match ignores case and suffixes such as ``-Instruct``, ``-FP8`` and ``-0528``.
    """
    owner, slash, model = name.lower().rpartition("/")
    while True:
        for preset in preset_names():
            preset_owner, *others = _ALIASES[preset]
            if model in (preset, *others) and (not slash or owner == preset_owner):
                return preset
        shorter = _SUFFIX.sub("", model)
        if shorter == model:
            return None
        model = shorter
