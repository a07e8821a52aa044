"""The package ``flashinfer`` for its own tests: mlagen's entry points by FlashInfer's names.

References that the tests compare with are plain PyTorch. Any other name skips the test that calls
it, as it is no part of mlagen.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import pytest
import torch

import mlagen.cascade
import mlagen.decode
import mlagen.mla
import mlagen.xqa

adapters: Any = importlib.import_module("flashinfer_adapters")
references: Any = importlib.import_module("flashinfer_references")

LEFT_OUT = "no part of mlagen"

# The compute capability that tests see; kernels are those of the GPU.
CAPABILITY = tuple(map(int, os.environ.get("MLAGEN_SHIM_CAPABILITY", "9.0").split(".")))


class GPUArchitectureError(RuntimeError):
    """FlashInfer's error of an architecture; mlagen raises none."""


class SfLayout(Enum):
    """Layouts of the scales of NVFP4."""

    layout_linear = 2


class Missing:
    """A name that mlagen does not have: a test that calls it is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Missing:
        """Return an attribute of the same kind."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __or__(self, _: Any) -> Missing:
        """Return the name, which an annotation has in a union."""
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Skip the test."""
        pytest.skip(f"{self._name}: {LEFT_OUT}", allow_module_level=True)


@dataclass(frozen=True)
class MLAHeadDimensions:
    """Head dimensions of a model, before and after absorption."""

    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int


@dataclass(frozen=True)
class MLALayerDimensions:
    """Head dimensions and heads of a layer."""

    head_dimensions: MLAHeadDimensions
    num_heads: int


_DEEPSEEK = MLAHeadDimensions(128, 64, 128, 512)
_SMALLER = MLAHeadDimensions(64, 64, 64, 256)


def _is_major(*majors: int) -> Any:
    return lambda _device=None: CAPABILITY[0] in majors


def _sm_count(_device: Any = None) -> int:
    has_gpu = torch.cuda.is_available()
    return torch.cuda.get_device_properties(0).multi_processor_count if has_gpu else 132


def _counter_bytes(batch_size: int, num_heads: int, sm_count: int) -> int:
    return -(-max(batch_size * num_heads, sm_count) // 8) * 8 * 4


def _public(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


# Whether the file tests a wrapper of mlagen, which is a reference in other files.
_IS_OF_WRAPPER = os.environ.get("MLAGEN_SHIM_WRAPPER") == "mlagen"


def _decode_wrapper(*args: Any, **kwargs: Any) -> Any:
    """Return mlagen's wrapper where a file tests it, else what the file compares with."""
    if _IS_OF_WRAPPER or kwargs.get("backend") in {"cute-dsl", "trtllm-gen"}:
        return mlagen.decode.BatchDecodeWithPagedKVCacheWrapper(*args, **kwargs)
    return references.PagedDecode(*args, **kwargs)


_DECODE = {
    **_public(mlagen.decode),
    "BatchDecodeWithPagedKVCacheWrapper": _decode_wrapper,
    "single_decode_with_kv_cache": references.single_decode,
}
_MLA = {"BatchMLAPagedAttentionWrapper": adapters.BatchMlaWrapper} if _IS_OF_WRAPPER else {}
_PREFILL = {"BatchPrefillWithPagedKVCacheWrapper": references.PagedPrefill}


# Names by module, as FlashInfer has them.
NAMES: dict[str, dict[str, Any]] = {
    "": {
        "SfLayout": SfLayout,
        "xqa": mlagen.xqa.xqa,
        "xqa_mla": mlagen.xqa.xqa_mla,
        **_public(mlagen.cascade),
        **_DECODE,
        **_PREFILL,
    },
    "cascade": _public(mlagen.cascade),
    "xqa": {"xqa": mlagen.xqa.xqa, "xqa_mla": mlagen.xqa.xqa_mla},
    "decode": _DECODE,
    "prefill": _PREFILL,
    "mla": {
        **_public(mlagen.mla),
        **_MLA,
        "MLAHeadDimensions": MLAHeadDimensions,
        "MLALayerDimensions": MLALayerDimensions,
        "deepseek_mla_dimensions": _DEEPSEEK,
        "smaller_mla_dimensions": _SMALLER,
        "supported_mla_layer_dimensions": [
            MLALayerDimensions(_DEEPSEEK, 128),
            MLALayerDimensions(_DEEPSEEK, 64),
            MLALayerDimensions(_SMALLER, 32),
        ],
    },
    "mla._core": {"get_compute_capability": lambda _device=None: CAPABILITY},
    "utils": {
        "GPUArchitectureError": GPUArchitectureError,
        "ceil_div": lambda value, by: -(-value // by),
        "device_support_pdl": lambda _device=None: True,
        "get_compute_capability": lambda _device=None: CAPABILITY,
        "get_device_sm_count": _sm_count,
        "get_trtllm_gen_multi_ctas_kv_counter_bytes": _counter_bytes,
        "has_flashinfer_jit_cache": lambda: True,  # no module is built before the tests
        "is_sm90a_supported": _is_major(9),
        "is_sm100a_supported": _is_major(10),
        "is_sm110a_supported": _is_major(11),
        "is_sm12x_supported": _is_major(12),
        "round_up": lambda value, to: -(-value // to) * to,
    },
    "mla._sparse_mla_sm120": {
        "_sparse_mla_sm120_paged_attention": adapters.sparse_mla_paged_attention
    },
    "cute_dsl": {"is_cute_dsl_available": lambda: True},
    "cute_dsl.attention": {"cute_dsl_mla_decode": adapters.cute_dsl_mla_decode},
    "cute_dsl.utils": {
        "get_num_sm": _sm_count,
        "is_cute_dsl_arch_supported": lambda *_: True,
    },
    "fp4_quantization": {
        "e2m1_and_ufp8sf_scale_to_float": references.nvfp4_to_float,
        "nvfp4_quantize": references.nvfp4_quantize,
    },
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``flashinfer`` and any module in it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec of a module of the shim."""
        del path, target
        if name.partition(".")[0] != "flashinfer":
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module with its names."""
        own = module.__name__.partition(".")[2]
        module.__dict__.update(NAMES.get(own, {}))

        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            inner = f"{own}.{name}".strip(".")
            if any(known == inner or known.startswith(f"{inner}.") for known in NAMES):
                return importlib.import_module(f"{module.__name__}.{name}")
            return Missing(f"{module.__name__}.{name}")

        module.__dict__["__getattr__"] = missing


def install() -> None:
    """Put the shim in front of an installed FlashInfer, with stand-ins of what its tests import."""
    sys.meta_path.insert(0, _Finder())
    _stand_in("einops", rearrange=references.rearrange, repeat=references.repeat)
    _stand_in("tvm_ffi", use_torch_stream=_use_torch_stream)
    _stand_in("cutlass", __getattr__=_missing_of_cutlass)


def _missing_of_cutlass(name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"cutlass.{name}")


def _stand_in(name: str, **values: Any) -> None:
    if importlib.util.find_spec(name) is None:
        module = ModuleType(name)
        module.__dict__.update(values)
        sys.modules[name] = module


@contextmanager
def _use_torch_stream(context: Any) -> Any:
    with context:
        yield
