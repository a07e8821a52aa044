"""Program of `show --reproduce`: the same cubin, or a nonzero exit code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from cache_tools.tools.reproduction import program_of
from mlagen.cache.entry import Manifest
from mlagen.prewarming import PrewarmReport, PrewarmUnit

from .altered import folder_of


def run_program(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program where mlagen cannot be imported."""
    script = folder / "reproduce.py"
    script.write_text(f"import sys; sys.modules['mlagen'] = None\n{text}")
    return subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, check=False
    )


def compiler_of(unit: PrewarmUnit) -> str:
    """Return the compiler as the program reports it: NVRTC 12.8 omits its patch level."""
    assert unit.toolchain is not None
    return re.sub(r"^(nvrtc-12\.8)\.\d+$", r"\1", unit.toolchain)


def test_it_makes_the_same_cubin_without_mlagen(
    cached: PrewarmReport, cache_dir: Path, tmp_path: Path
) -> None:
    """It prints the kernel, the compiler and the digest of the cubin, and exits with 0."""
    unit = cached.units[0]
    folder = folder_of(unit, cache_dir)
    manifest = Manifest.from_json((folder / "manifest.json").read_bytes())

    ran = run_program(program_of(manifest, folder), tmp_path)

    digest = manifest.files["kernel.cubin"].sha256
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{unit.spec} by {compiler_of(unit)}: sha256 {digest}\n"


def test_another_cubin_fails(cached: PrewarmReport, cache_dir: Path, tmp_path: Path) -> None:
    """A changed source gives a nonzero exit code."""
    folder = folder_of(cached.units[0], cache_dir)
    manifest = Manifest.from_json((folder / "manifest.json").read_bytes())
    source = (folder / "kernel.cu").read_text()
    (folder / "kernel.cu").write_text(source.replace("combine(", "combine_2("))

    ran = run_program(program_of(manifest, folder), tmp_path)

    expected = f"expected sha256 {manifest.files['kernel.cubin'].sha256}, built by "
    assert (ran.returncode, ran.stderr) == (1, f"{expected}{manifest.toolchain}\n")


def test_a_compile_error_is_shown(cached: PrewarmReport, cache_dir: Path, tmp_path: Path) -> None:
    """The log of NVRTC is printed, without a traceback."""
    folder = folder_of(cached.units[0], cache_dir)
    manifest = Manifest.from_json((folder / "manifest.json").read_bytes())
    (folder / "kernel.cu").write_text("int f() { return nothing; }\n")

    ran = run_program(program_of(manifest, folder), tmp_path)

    assert ran.returncode == 1
    assert 'kernel.cu(1): error: identifier "nothing" is undefined' in ran.stderr
    assert "Traceback" not in ran.stderr
