"""What a process that needs little does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cache.builds import ROOT

# What a process does, and a package or library that it leaves alone.
PROCESSES = {
    "the digest of a kernel": (
        "from mlagen.codegen.sources import template_digest as digest; "
        "digest('kernels/combine/kernel.cu.j2')"
    ),
    "finding NVRTC": "from mlagen.compiler.toolchain import find_nvrtc; find_nvrtc()",
    "facts of GPUs": "from mlagen.runtime.device import *; visible_devices(), driver_version()",
    "the plugin of SGLang": "import mlagen.integrations.sglang",
    "the plugin of vLLM": "import mlagen.integrations.vllm",
}
UNUSED = {"the digest of a kernel": "jinja2", "finding NVRTC": "cuda, libnvrtc"}
LOADED = """
maps = open("/proc/self/maps").read()
print([name for name in {!r}.split(", ") if name in sys.modules or f"/{{name}}" in maps])
"""


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_loads_no_package_that_it_does_not_need(process: str) -> None:
    """Warm calls, commands without a GPU and servers with other backends start fast."""
    code = f"import sys; {PROCESSES[process]}{LOADED.format(UNUSED.get(process, 'torch'))}"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
