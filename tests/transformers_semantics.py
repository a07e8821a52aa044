"""Tiny random models of transformers that decode with mlagen, on the device of the fixture.

Weights are random and nothing is downloaded. The same weights decode in fp32 by eager attention.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch

from tests.integrations.mla_layer import HEADS, LATENT, NOPE, ROPE, Layer, Model

BATCH, PROMPT, STEPS, TOKENS = 2, 21, 5, 64
VOCABULARY, LAYERS = 64, 2
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
LATENT_SIZES = SIZES | {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "mlp_layer_types": ["dense", "dense"],
}


def llama() -> Any:
    """Return a Llama of grouped-query attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    return LlamaForCausalLM(LlamaConfig(**SIZES | heads))


def deepseek_v3() -> Any:
    """Return a DeepSeek-V3 of dense layers."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT_SIZES))


def deepseek_v32() -> Any:
    """Return a DeepSeek-V3.2 whose indexer chooses all tokens, so that rounding chooses none."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    index = {"index_topk": TOKENS, "index_n_heads": 4, "index_head_dim": 128}
    return DeepseekV32ForCausalLM(DeepseekV32Config(**LATENT_SIZES | index))


MODELS = {"llama": llama, "deepseek-v3": deepseek_v3, "deepseek-v32": deepseek_v32}
# Of these weights the best token of every step is ten times farther from the second than bf16 errs.
SEEDS = {llama: 15, deepseek_v3: 19, deepseek_v32: 15}


def models_of(make: Callable[[], Any], device: str) -> tuple[Any, Any]:
    """Return a model in bf16 that decodes with mlagen, and its weights in fp32 and eager."""
    from mlagen.integrations.transformers import register, use_mla

    torch.manual_seed(SEEDS[make])
    model = make().to(device, torch.bfloat16).eval()
    exact = copy.deepcopy(model).float()
    exact.set_attn_implementation("eager")
    register()
    if hasattr(model.config, "kv_lora_rank"):
        use_mla(model)
    else:
        model.set_attn_implementation("mlagen")
    return model, exact


def prompt_of(device: str) -> torch.Tensor:
    """Return the token ids of the prompts."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, VOCABULARY, (BATCH, PROMPT), generator=generator).to(device)


def static_cache(model: Any) -> dict[str, Any]:
    """Return a static cache, as the argument of a forward."""
    from transformers import StaticCache

    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    return {name: StaticCache(config=model.config, max_cache_len=TOKENS)}


@torch.no_grad()
def decoded(model: Any, given: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logits of the last ``STEPS`` tokens that are given, step by step."""
    cache, logits = static_cache(model), []
    for end in range(PROMPT, PROMPT + STEPS + 1):
        step = given[:, 0 if end == PROMPT else end - 1 : end]
        masks = {}
        if padding is not None:
            mask = torch.cat([padding, padding.new_ones(BATCH, end - PROMPT)], dim=1)
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -step.shape[1] :]
            masks = {"attention_mask": mask, "position_ids": positions}
        logits.append(model(step, **cache, **masks).logits[:, -1].float())
    return torch.stack(logits[1:])


class ModelSemantics:
    """Models whose decode steps mlagen serves."""

    @pytest.fixture(autouse=True)
    def _needs_transformers(self) -> None:
        pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17")

    @pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
    @pytest.mark.parametrize("name", MODELS)
    def test_logits_equal_those_of_eager_attention(
        self, name: str, device: str, *, padded: bool
    ) -> None:
        """Decode steps in bf16 are about as close to fp32 as those of eager attention in bf16."""
        from mlagen.integrations.transformers import explain

        model, exact = models_of(MODELS[name], device)
        given = torch.cat([prompt_of(device), prompt_of(device)], dim=1)
        padding = None
        if padded:
            padding = torch.ones(BATCH, PROMPT, dtype=torch.int64, device=device)
            padding[1, :7] = 0
        before = sum(n for served, n in explain().items() if served.startswith("mlagen"))

        got = decoded(model, given, padding)

        after = sum(n for served, n in explain().items() if served.startswith("mlagen"))
        model.set_attn_implementation("eager")
        rounded, wanted = decoded(model, given, padding), decoded(exact, given, padding)
        assert after - before == STEPS * LAYERS
        limit = 2 * (rounded - wanted).abs().max() + 0.01 * wanted.std()
        assert (got - wanted).abs().max() <= limit

    @pytest.mark.parametrize(
        "bounds",
        [(0, 1), (0, 63), (0, 65), (0, 999), (0, 1000), (30, 40), (30, 970)],
        ids=lambda given: f"{given[1]} tokens behind {given[0]}",
    )
    @pytest.mark.parametrize("attention", ["GQA", "MLA"])
    @torch.no_grad()
    def test_a_static_cache_has_any_length(
        self, attention: str, bounds: tuple[int, int], device: str
    ) -> None:
        """A step over a cache of 1000 tokens has pages of 64 tokens, padded or not."""
        from mlagen.integrations.transformers import explain
        from mlagen.integrations.transformers.attention import attention as attend
        from mlagen.integrations.transformers.latent import absorb

        layer: Any = torch.nn.Module()
        heads, kv_heads, dims = 8, 2, (128, 128)
        if attention == "MLA":
            model = Model().to(device)
            model.set_attn_implementation("mlagen")
            layer, heads, kv_heads, dims = model.layers[0], HEADS, 1, (LATENT, ROPE)
            absorb(layer)
        width = NOPE + ROPE if attention == "MLA" else dims[0]
        shapes = [(2, heads, 1, width), *((2, kv_heads, 1000, dim) for dim in dims)]
        torch.manual_seed(0)
        query, *caches = (torch.randn(shape).to(device, torch.bfloat16) for shape in shapes)
        (first, count), marks = bounds, [1, 1] if bounds[0] else []
        mask = torch.tensor([first, count, *marks], dtype=torch.int32, device=device)
        seen = [cache[:, :, first : first + count] for cache in caches]
        keys, values = Layer.expand_kv(layer, *seen) if attention == "MLA" else seen
        keys, values = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (keys, values))
        weights = (query.float() @ keys.mT * width**-0.5).softmax(-1)
        before = dict(explain())

        out, _ = attend(layer, query, caches[0], caches[1], mask.repeat(2, 1, 1, 1))

        name = f"mlagen {attention}, pages of 64 tokens"
        assert explain()[name] == before.get(name, 0) + 1
        wanted = (weights @ values).transpose(1, 2)
        torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=2e-2)

    @pytest.mark.parametrize("name", MODELS)
    def test_greedy_tokens_equal_those_of_eager_attention(self, name: str, device: str) -> None:
        """Generation in bf16 gives the tokens of eager attention in fp32."""
        model, exact = models_of(MODELS[name], device)
        prompt = prompt_of(device)
        options: dict[str, Any] = {"max_new_tokens": STEPS, "do_sample": False}
        options |= {"cache_implementation": "static", "disable_compile": True}
        options |= {"attention_mask": torch.ones_like(prompt)}

        got, wanted = (each.generate(prompt, **options) for each in (model, exact))

        assert got.tolist() == wanted.tolist()

    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.filterwarnings("ignore")  # torch warns about itself
    def test_a_decode_step_is_one_graph(self, name: str, device: str) -> None:
        """A compiled step has no graph break, and gives the logits of an eager one."""
        torch._dynamo.reset()
        model, _ = models_of(MODELS[name], device)
        del model.model.layers[1:]  # a break would be in each
        prompt, results = prompt_of(device), []
        with torch.no_grad():
            for is_compiled in (False, True):
                cache = static_cache(model)
                model(prompt, **cache)

                def step(token: torch.Tensor, cache: Any = cache) -> torch.Tensor:
                    logits: torch.Tensor = model(token, **cache).logits
                    return logits

                if is_compiled:
                    step = torch.compile(step, fullgraph=True, backend="aot_eager")
                results.append([step(prompt[:, i : i + 1]) for i in range(2)])

        # A compiler may round intermediate values of the model in another order.
        torch.testing.assert_close(results[1], results[0], atol=2e-2, rtol=2e-2)

    def test_continuous_batching_gives_the_tokens_of_sdpa(
        self, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Prompts of different lengths, with chunks and steps in one batch, continue alike."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
        from transformers.generation.continuous_batching import cache

        if not version("transformers").startswith("5.17."):
            pytest.skip("newer transformers have another cache, or no foreign implementations")
        if device == "cpu":  # asks how much memory a GPU has
            memory = (torch.device("cpu"), 1 << 30, 0, 0)
            monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda *_, **__: memory)
        model, _ = models_of(llama, device)
        row = prompt_of(device)[0].tolist()
        prompts = [row[:length] for length in (2, 21, 11)]
        config = GenerationConfig(max_new_tokens=STEPS, do_sample=False, eos_token_id=-1)
        said = []
        for name in ("paged|sdpa", "paged|mlagen"):
            model.set_attn_implementation(name)
            outputs = model.generate_batch(
                prompts,
                generation_config=config,
                continuous_batching_config=ContinuousBatchingConfig(
                    num_blocks=16, block_size=32, max_batch_tokens=16, use_cuda_graph=False
                ),
                warmup=False,
            )
            said.append({tuple(out.prompt_ids): out.generated_tokens for out in outputs.values()})

        assert len(said[0]) == len(prompts)
        assert said[1] == said[0]
