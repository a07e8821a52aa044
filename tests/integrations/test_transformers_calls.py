"""Single calls of the transformers integration, over stand-ins of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.errors import UnsupportedError
from tests.integrations.mla_layer import HEADS, LATENT, NOPE, ROPE, Layer, Model

BATCH, KV_HEADS, GROUP, HEAD_DIM = 2, 2, 4, 64
SCALE = 0.2
MODULE = torch.nn.Module()
PADDING = torch.ones(BATCH, 21, dtype=torch.bool)
PADDING[1, :7] = False


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor of a fixed seed for each shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def qkv(tokens: int, q_len: int = 1, **options: Any) -> list[torch.Tensor]:
    """Return query, keys and values of a static cache."""
    heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    lengths = (q_len, tokens, tokens)
    return [
        random(BATCH, head, length, HEAD_DIM, **options) + index
        for index, (head, length) in enumerate(zip(heads, lengths, strict=True))
    ]


def mask_of(integration: Any, tokens: int, seen: int = 20, **options: Any) -> Any:
    """Return the mask of a decode step behind ``seen`` tokens of a static cache."""
    given = {"batch_size": BATCH, "q_length": 1, "kv_length": tokens, "device": "cpu"}
    given |= {
        "q_offset": torch.tensor(seen),
        "mask_function": integration.masks.causal_mask_function,
    }
    return integration.masks.decode_mask(**given | options)


def expected(*inputs: torch.Tensor) -> torch.Tensor:
    """Return attention in float64 to what is seen, ``[batch, q_len, heads, head_dim]``."""
    query, keys, values, sees = inputs
    group = query.shape[1] // keys.shape[1]
    query, keys, values = (each.double() for each in (query, keys, values))
    keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
    scores = (query @ keys.transpose(2, 3) * SCALE).masked_fill(~sees, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(1, 2)


def seen_tokens(tokens: int, padding: torch.Tensor | None = None, seen: int = 21) -> torch.Tensor:
    """Return which tokens of the cache a step sees, ``[batch, 1, 1, tokens]``."""
    sees = torch.zeros(BATCH, 1, 1, tokens, dtype=torch.bool)
    sees[..., :seen] = True if padding is None else padding[:, None, None]
    return sees


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare with the rounding of bf16."""
    torch.testing.assert_close(got.double(), wanted, atol=2e-2, rtol=2e-2)


class TestMask:
    """Which steps have bounds, and what the others have."""

    def test_a_step_over_a_static_cache_has_bounds(self, integration: Any) -> None:
        """The mask is the first token and the number of tokens of each sequence."""
        mask = mask_of(integration, 64)

        assert mask.dtype == torch.int32
        assert mask.tolist() == [[[[0, 21]]]] * BATCH

    def test_padding_on_the_left_moves_the_first_token(self, integration: Any) -> None:
        """Bounds begin behind the padding, and a third column marks them."""
        mask = mask_of(integration, 64, attention_mask=PADDING)

        assert mask.tolist() == [[[[0, 21, 1]]], [[[7, 14, 1]]]]
        full = mask_of(integration, 64, attention_mask=torch.ones_like(PADDING))
        assert full.shape[-1] == 2

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"q_offset": 20}, "fixed length"),
            ({"kv_offset": 4}, "window"),
            ({"mask_function": max}, "not causal"),
            ({"config": SimpleNamespace(index_topk=8)}, "indexer"),
            ({"kv_length": 8}, "fewer than 16"),
            ({"attention_mask": PADDING.flip(1)}, "not left"),
            ({"attention_mask": PADDING, "q_offset": torch.tensor(30)}, "not left"),
        ],
        ids=lambda given: given.replace(" ", "-") if isinstance(given, str) else "",
    )
    def test_any_other_step_has_the_mask_of_sdpa(
        self, integration: Any, options: dict[str, Any], reason: str
    ) -> None:
        """A step that no kernel serves has bools, and its reason is in the record."""
        mask = mask_of(integration, **{"tokens": 64} | options)

        assert mask.dtype == torch.bool
        assert any(reason in served for served in integration.package.explain())

    def test_a_prompt_has_the_mask_of_sdpa(self, integration: Any) -> None:
        """More than one query token is no decode step."""
        mask = mask_of(integration, 64, q_length=3)

        assert mask.shape == (BATCH, 1, 3, 64)
        assert integration.package.explain() == {}

    def test_a_model_that_adds_to_bounds_fails(self, integration: Any) -> None:
        """Bounds do not broadcast against scores."""
        for padding in (None, PADDING):
            with pytest.raises(RuntimeError, match="must match"):
                mask_of(integration, 64, attention_mask=padding) + torch.zeros(1, 8, 1, 64)


class TestGqa:
    """Attention of one query token over a static cache."""

    @pytest.mark.parametrize(
        ("tokens", "padding", "pages"),
        [
            (64, None, "pages of 64 tokens"),
            (48, None, "pages of 16 tokens"),
            (53, None, "pages of one token"),
            (64, PADDING, "pages of one token"),
        ],
        ids=["pages of 64", "pages of 16", "odd length", "padded"],
    )
    def test_a_step_is_served_in_place(
        self, integration: Any, tokens: int, padding: torch.Tensor | None, pages: str
    ) -> None:
        """A step equals attention in float64 over the tokens that it sees, NaNs elsewhere."""
        query, keys, values = qkv(tokens)
        sees = seen_tokens(tokens, padding)
        wanted = expected(query, keys, values, sees)
        for cache in (keys, values):
            cache.masked_fill_(~sees.transpose(2, 3), torch.nan)
        mask = mask_of(integration, tokens, attention_mask=padding)

        out, weights = integration.attention.attention(
            MODULE, query, keys, values, mask, scaling=SCALE
        )

        assert weights is None
        assert_close(out, wanted)
        assert integration.package.explain() == {f"mlagen GQA, {pages}": 1}

    def test_a_step_compiles_into_one_graph(self, integration: Any) -> None:
        """Compiled code equals eager code, and keeps no record."""
        inputs = qkv(64)

        def step(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            mask = mask_of(integration, 64)
            out: torch.Tensor = integration.attention.attention(
                MODULE, query, keys, values, mask, scaling=SCALE
            )[0]
            return out

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")

        got = compiled(*inputs)
        assert integration.package.explain() == {}
        assert torch.equal(got, step(*inputs))

    def test_compiled_code_cannot_tell_padding(self, integration: Any) -> None:
        """With a 2-D attention mask, compiled code attends by sdpa to all that it allows."""
        inputs = qkv(64)

        def step(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            mask = mask_of(integration, 64, attention_mask=PADDING)
            out: torch.Tensor = integration.attention.attention(
                MODULE, query, keys, values, mask, scaling=SCALE
            )[0]
            return out

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")

        assert_close(compiled(*inputs), expected(*inputs, seen_tokens(64, PADDING)))

    def test_a_scale_is_that_of_the_head_dim_by_default(self, integration: Any) -> None:
        """Without ``scaling`` the scores have the usual factor."""
        inputs, mask = qkv(64), mask_of(integration, 64)

        outs = [
            integration.attention.attention(MODULE, *inputs, mask, **given)[0]
            for given in ({}, {"scaling": HEAD_DIM**-0.5})
        ]

        assert torch.equal(*outs)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda q, k, v: (q.float(), k.float(), v.float()), "dtype torch.float32"),
            (lambda q, k, v: (q, k, v[..., :32]), "head dims"),
            (lambda q, k, v: (q[..., :40], k[..., :40], v[..., :40]), "head dim 40"),
            (lambda q, k, v: (q, *(x.mT.contiguous().mT for x in (k, v))), "contiguous"),
        ],
        ids=["fp32", "two head dims", "head dim", "strides"],
    )
    def test_bounds_serve_sdpa_too(self, integration: Any, change: Any, reason: str) -> None:
        """A step that no kernel serves is computed by sdpa over the same tokens."""
        inputs = change(*qkv(64))

        out, _ = integration.attention.attention(
            MODULE, *inputs, mask_of(integration, 64, attention_mask=PADDING), scaling=SCALE
        )

        assert_close(out, expected(*inputs, seen_tokens(64, PADDING)))
        (served,) = integration.package.explain()
        assert served.startswith("sdpa: ")
        assert reason in served

    def test_a_prompt_is_computed_by_sdpa(self, integration: Any) -> None:
        """More than one query token goes to sdpa, with the mask as it is."""
        inputs = qkv(64, q_len=3)
        sees = seen_tokens(64).expand(-1, -1, 3, -1)

        out, _ = integration.attention.attention(MODULE, *inputs, sees, scaling=SCALE)

        assert_close(out, expected(*inputs, sees))
        assert integration.package.explain() == {"sdpa: more than one query token": 1}

    def test_sinks_are_rejected(self, integration: Any) -> None:
        """A layer with sinks is not computed without them."""
        with pytest.raises(UnsupportedError, match="s_aux"):
            integration.attention.attention(MODULE, *qkv(64), None, s_aux=torch.zeros(8))


def absorbed(integration: Any) -> Layer:
    """Return a layer of a model that decodes by absorbed weights."""
    model = Model()
    integration.package.use_mla(model)
    layer = model.layers[1]
    assert isinstance(layer, Layer)
    return layer


def latent_inputs(tokens: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the query of a step, and the compressed cache."""
    query = random(BATCH, HEADS, 1, NOPE + ROPE)
    return query, random(BATCH, 1, tokens, LATENT), random(BATCH, 1, tokens, ROPE)


class TestMla:
    """Absorbed decode over a compressed cache."""

    @pytest.mark.parametrize("padding", [None, PADDING], ids=["plain", "padded"])
    def test_an_absorbed_step_equals_expanded_attention(
        self, integration: Any, padding: torch.Tensor | None
    ) -> None:
        """A step over latents equals attention over the keys and values that they stand for."""
        layer = absorbed(integration)
        query, latents, rope = latent_inputs()
        keys, values = Layer.expand_kv(layer, latents, rope)
        wanted = expected(query, keys, values, seen_tokens(64, padding))
        kept = layer.expand_kv(latents, rope)
        mask = mask_of(integration, 64, attention_mask=padding)

        out, _ = integration.attention.attention(layer, query, *kept, mask, scaling=SCALE)

        assert kept == (latents, rope)
        assert_close(out, wanted.detach())
        (served,) = integration.package.explain()
        assert served.startswith("mlagen MLA, pages of ")

    @pytest.mark.parametrize("tokens", [64, 37], ids=["static", "dynamic"])
    def test_a_step_attends_to_the_tokens_of_the_indexer(
        self, integration: Any, tokens: int
    ) -> None:
        """Only top-k tokens count, and of those only what the mask allows."""
        layer = absorbed(integration)
        query, latents, rope = latent_inputs(tokens)
        keys, values = Layer.expand_kv(layer, latents, rope)
        sees = seen_tokens(tokens, PADDING)
        order = torch.rand(BATCH, tokens).add(sees[:, 0, 0].float()).argsort(descending=True)
        indices = order[:, None, :16].int()
        chosen = torch.zeros_like(sees).scatter_(-1, indices[:, None].long(), value=True)

        out, _ = integration.attention.attention(
            layer, query, latents, rope, sees, scaling=SCALE, indices=indices
        )

        assert int((chosen & sees).sum()) == 16 + 14  # of the second sequence there are no more
        assert_close(out, expected(query, keys, values, chosen & sees).detach())
        assert integration.package.explain() == {"mlagen MLA, the top-k tokens of the indexer": 1}

    @pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], ids=str)
    def test_a_prompt_expands_the_cache(self, integration: Any, dtype: torch.dtype) -> None:
        """Two query tokens go to sdpa, over the tokens of the indexer alone."""
        layer = absorbed(integration)
        _, latents, rope = latent_inputs()
        query = random(BATCH, HEADS, 2, NOPE + ROPE)
        sees = seen_tokens(64).expand(-1, -1, 2, -1)
        indices = torch.arange(16, dtype=torch.int32).expand(BATCH, 2, 16)
        mask = sees if dtype == torch.bool else torch.zeros(sees.shape, dtype=dtype)
        mask = mask if dtype == torch.bool else mask.masked_fill(~sees, torch.finfo(dtype).min)
        keys, values = Layer.expand_kv(layer, latents, rope)

        out, _ = integration.attention.attention(
            layer, query, latents, rope, mask, scaling=SCALE, indices=indices
        )

        sees = sees & (torch.arange(64) < 16)
        assert_close(out.detach(), expected(query, keys, values, sees).detach())

    def test_a_step_without_bounds_expands_the_cache(self, integration: Any) -> None:
        """A cache that grows has no mask, and its step goes to sdpa."""
        layer = absorbed(integration)
        query, latents, rope = latent_inputs(21)
        keys, values = Layer.expand_kv(layer, latents, rope)

        out, _ = integration.attention.attention(layer, query, latents, rope, None, scaling=SCALE)

        assert_close(out.detach(), expected(query, keys, values, seen_tokens(21)).detach())
        assert integration.package.explain() == {"sdpa: latents": 1}

    def test_indices_without_a_mask_reach_sdpa(self, integration: Any) -> None:
        """A model with an indexer that was not absorbed attends to its top-k tokens alone."""
        query, keys, values = qkv(64)
        indices = torch.arange(16, dtype=torch.int32).expand(BATCH, 1, 16)

        out, _ = integration.attention.attention(
            MODULE, query, keys, values, None, scaling=SCALE, indices=indices
        )

        assert_close(out, expected(query, keys, values, seen_tokens(64, seen=16)))

    def test_another_implementation_restores_the_layers(self, integration: Any) -> None:
        """Layers expand the cache again once the implementation is another one."""
        model = Model()
        integration.package.use_mla(model)
        _, latents, rope = latent_inputs()

        model.set_attn_implementation("sdpa")

        layer: Any = model.layers[0]
        keys, _ = layer.expand_kv(latents, rope)
        assert keys.shape == (BATCH, HEADS, 64, NOPE + ROPE)

    def test_a_model_that_no_kernel_serves_is_rejected(self, integration: Any) -> None:
        """No layer is changed unless all of them are served."""
        for change, message in (
            ({"kv_lora_rank": 256}, r"expected \(512, 64\) for absorbed decode, got \(256, 64\)"),
            ({"kv_b_proj": SimpleNamespace(weight=torch.zeros(2).to(torch.float8_e4m3fn))}, "16"),
        ):
            model = Model()
            del model.layers[1].kv_b_proj
            model.layers[1].__dict__.update({"kv_b_proj": torch.nn.Linear(2, 2)} | change)

            with pytest.raises(UnsupportedError, match=message):
                integration.package.use_mla(model)

            assert "expand_kv" not in vars(model.layers[0])
        with pytest.raises(UnsupportedError, match="expected layers with expand_kv"):
            integration.package.use_mla(torch.nn.Linear(2, 2))


class PagedCache:
    """The part of a paged cache that the integration reads: one layer, slots of one token."""

    layer_index_to_group_indices = ((0, 0),)

    def __init__(self, slots: int = 96, window: int = 1) -> None:
        self.sliding_windows = (window,)
        self.key_cache = [random(slots, KV_HEADS, HEAD_DIM)]
        self.value_cache = [random(slots, KV_HEADS, HEAD_DIM) + 1]


def paged_call(integration: Any, q_lens: list[int], seq_lens: list[int], **options: Any) -> Any:
    """Return the output of a batch, and what float64 says of it."""
    cache = options.pop("cache", None) or PagedCache()
    slots = torch.randperm(96, generator=torch.Generator().manual_seed(1))[: sum(seq_lens)]
    tokens, ends = sum(q_lens), torch.tensor([0, *seq_lens]).cumsum(0)
    query, keys, values = (random(1, heads, tokens, HEAD_DIM) for heads in (8, 2, 2))
    requests = [slots[ends[i] : ends[i + 1]] for i in range(len(seq_lens))]
    write = torch.cat(
        [own[len(own) - q_len :] for own, q_len in zip(requests, q_lens, strict=True)]
    )
    starts = torch.tensor([0, *q_lens]).cumsum(0)
    are_prompts = q_lens == seq_lens
    out, _ = integration.continuous.paged_attention(
        SimpleNamespace(layer_idx=0),
        query,
        keys,
        values,
        None,
        scaling=SCALE,
        cache=cache,
        read_index=[slots[:0] if are_prompts else slots],
        write_index=[write],
        cu_seq_lens_q=starts,
        cu_seq_lens_k=ends,
        max_seqlen_q=max(q_lens),
        max_seqlen_k={"full_attention": max(seq_lens)},
    )
    wanted = []
    for i, own in enumerate(requests):
        sees = torch.ones(q_lens[i], len(own)).tril(len(own) - q_lens[i]).bool()
        cached = (
            part[0][own].transpose(0, 1)[None] for part in (cache.key_cache, cache.value_cache)
        )
        wanted.append(expected(query[:, :, starts[i] : starts[i + 1]], *cached, sees))
    return out, torch.cat(wanted, dim=1)


class TestContinuousBatching:
    """Ragged calls over the paged cache of continuous batching."""

    @pytest.mark.parametrize(
        ("q_lens", "seq_lens"),
        [([3, 5], [3, 5]), ([1, 1, 1], [9, 30, 2]), ([4, 1, 7], [20, 33, 7])],
        ids=["prompts", "decode", "both"],
    )
    def test_a_batch_of_requests_is_one_call(
        self, integration: Any, q_lens: list[int], seq_lens: list[int]
    ) -> None:
        """Every request attends to its own tokens, the new ones included."""
        out, wanted = paged_call(integration, q_lens, seq_lens)

        assert_close(out, wanted)
        assert integration.package.explain() == {"mlagen GQA, continuous batching": 1}

    def test_a_window_is_rejected(self, integration: Any) -> None:
        """A layer with a sliding window is not computed without it."""
        with pytest.raises(UnsupportedError, match="sliding window"):
            paged_call(integration, [1], [9], cache=PagedCache(window=4))

    def test_a_call_outside_of_continuous_batching_is_rejected(self, integration: Any) -> None:
        """Without a paged cache there is nothing to attend to."""
        with pytest.raises(UnsupportedError, match="paged cache"):
            integration.continuous.paged_attention(MODULE, *qkv(64), None)


class TestRegister:
    """What transformers knows after registration."""

    def test_the_names_are_registered(self, integration: Any) -> None:
        """Both implementations and the mask are there, once for any number of calls."""
        attentions, masks = integration.registries

        for _ in range(2):
            integration.package.register()

        assert set(attentions.entries) == {"paged|sdpa", "mlagen", "paged|mlagen"}
        assert set(masks.entries) == {"mlagen"}

    def test_continuous_batching_of_fixed_names_is_left_alone(self, integration: Any) -> None:
        """A transformers that admits only its own names gets none for continuous batching."""
        attentions, _ = integration.registries
        del attentions.entries["paged|sdpa"]

        integration.package.register()

        assert set(attentions.entries) == {"mlagen"}

    def test_the_first_call_of_a_kind_is_logged(
        self, integration: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One line says what serves, and later calls are counted."""
        caplog.set_level("INFO", logger="mlagen")

        for _ in range(3):
            integration.record.record("sdpa: a reason")

        assert caplog.messages == ["transformers: attention by sdpa: a reason"]
        assert integration.package.explain() == {"sdpa: a reason": 3}
