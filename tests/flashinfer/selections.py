"""FlashInfer's test files of mlagen's entry points."""

from __future__ import annotations

from typing import NamedTuple


class Selection(NamedTuple):
    """Tests of a file, and the compute capability that they see.

    FlashInfer's tests ask for the GPU that each of its backends needs, and mlagen's entry points
    work on all.
    """

    file: str
    capability: str = "9.0"
    keyword: str = ""
    pieces: int = 1  # processes of a parallel run, by the number of tests
    tests_wrapper: bool = False  # not a function, for which the wrapper is a reference

    def __str__(self) -> str:
        """Return the name of the selection."""
        return f"{self.file} as {self.capability}"


_WRAPPER = "explicit_wrapper_matches"
SELECTIONS = (
    Selection("test_trtllm_gen_attention_decode_xqa.py", pieces=8),
    Selection("test_xqa.py", pieces=8),
    Selection("test_trtllm_gen_mla.py", "10.0", pieces=4),
    Selection("test_deepseek_mla.py", pieces=4),
    Selection("test_trtllm_gen_mla.py", "12.0", "xqa", pieces=2),
    Selection("test_xqa_batch_decode.py", pieces=2),
    Selection("test_batch_decode_kernels.py", keyword="not single", pieces=2, tests_wrapper=True),
    Selection("test_tensor_cores_decode.py", keyword="batch", pieces=2, tests_wrapper=True),
    Selection("test_batch_invariant_fa2.py", keyword="decode", tests_wrapper=True),
    Selection("test_trtllm_gen_attention_decode.py", "10.0", pieces=8),
    Selection("test_deepseek_mla.py", "10.0", "cutlass"),
    Selection("test_mla_decode_kernel.py"),
    Selection("test_mla_auto_backend_warning.py"),
    Selection("test_mla_wrapper.py", "8.0", _WRAPPER, tests_wrapper=True),
    Selection("test_mla_wrapper.py", "9.0", f"{_WRAPPER} or host_control", tests_wrapper=True),
    Selection("test_mla_wrapper.py", "10.0", _WRAPPER, tests_wrapper=True),
    Selection("test_mla_wrapper.py", "12.0", _WRAPPER, tests_wrapper=True),
    Selection("test_cutlass_mla_fp8_output.py", "10.0"),
    Selection("test_cute_dsl_mla_decode.py", "10.0"),
    Selection("test_cute_dsl_mla_dcp.py", "10.0"),
    Selection("test_cute_dsl_decode.py", "10.0", "wrapper_cute_dsl"),
    Selection("test_decode_fp8_calibration_scale.py", keyword="batch", tests_wrapper=True),
    Selection("test_decode_prefill_lse.py", tests_wrapper=True),
    Selection("test_non_contiguous_decode.py", tests_wrapper=True),
    Selection("test_shared_prefix_kernels.py", keyword="merge_state"),
    Selection("test_sliding_window.py", keyword="batch_decode", tests_wrapper=True),
    Selection("test_sparse_mla_sm120.py", "12.0"),
    Selection("test_xqa.py", "12.0", "xqa_mla"),
    Selection("test_xqa_batch_decode.py", "12.0", "nvfp4"),
    Selection("test_xqa_mla_batch_decode.py", "12.0"),
    Selection("test_xqa_mla_bf16.py", "12.0"),
)
