"""Artifacts that the stages pass to each other."""

from __future__ import annotations

import json

import pytest

from mlagen.artifacts import Cubin, Resources, Source, build_of


def resources(*, spill_store_bytes: int = 0, spill_load_bytes: int = 0) -> Resources:
    """Return ptxas' resources of a kernel."""
    return Resources(
        symbol="mla_sm80",
        registers=186,
        stack_bytes=0,
        spill_store_bytes=spill_store_bytes,
        spill_load_bytes=spill_load_bytes,
        static_shared_bytes=16,
    )


@pytest.mark.parametrize(
    ("kernel", "has_spills"),
    [
        (resources(), False),
        (resources(spill_store_bytes=4), True),
        (resources(spill_load_bytes=4), True),
    ],
    ids=["neither", "a store", "a load"],
)
def test_a_spill_is_a_store_or_a_load(kernel: Resources, has_spills: bool) -> None:
    """A kernel spills if ptxas counts a byte of either."""
    actual = kernel.has_spills

    assert actual is has_spills


def test_a_build_holds_all_parts_of_an_entry() -> None:
    """The files are cubin, source, line map and log; the facts are JSON with the resources."""
    source = Source(text="int a;\nint b;\n", origins=("a.cuh:1", "b.cuh:7"))
    cubin = Cubin(
        code=b"\x7fELF",
        log="ptxas info\n",
        resources=(resources(),),
        toolchain="nvrtc-13.5.37",
        compile_ms=512.345,
    )

    build = build_of(
        source, cubin, spec={"page_size": "64"}, symbol="mla_sm80", shared_bytes=93_632
    )

    assert build.toolchain == "nvrtc-13.5.37"
    assert build.files == {
        "kernel.cubin": b"\x7fELF",
        "kernel.cu": b"int a;\nint b;\n",
        "kernel.map": b"a.cuh:1\nb.cuh:7\n",
        "build.log": b"ptxas info\n",
    }
    assert json.loads(json.dumps(build.facts)) == {
        "kernel": {
            "symbol": "mla_sm80",
            "spec": {"page_size": "64"},
            "dynamic_shared_bytes": 93_632,
        },
        "resources": [
            {
                "symbol": "mla_sm80",
                "registers": 186,
                "stack_bytes": 0,
                "spill_store_bytes": 0,
                "spill_load_bytes": 0,
                "static_shared_bytes": 16,
            }
        ],
        "compile_ms": 512.3,
    }
