"""Models of transformers on a GPU, and their compiled generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.transformers_semantics import STEPS, ModelSemantics, llama, models_of, prompt_of


class TestModels(ModelSemantics):
    """The shared tests, on a GPU."""

    @pytest.mark.filterwarnings("ignore")  # Inductor warns about itself
    def test_compiled_generation_gives_the_same_tokens(self, device: str) -> None:
        """The step that ``generate`` compiles by itself, with CUDA graphs, decodes alike."""
        model, exact = models_of(llama, device)
        prompt = prompt_of(device)
        options: dict[str, Any] = {"max_new_tokens": STEPS, "do_sample": False}
        options |= {"cache_implementation": "static"}
        options |= {"attention_mask": torch.ones_like(prompt)}

        wanted = exact.generate(prompt, disable_compile=True, **options)

        assert model.generate(prompt, **options).tolist() == wanted.tolist()
