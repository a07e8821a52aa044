"""The import table of our own modules and of third parties, and what processes load."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Each layer with what it may import besides itself. A layer is a module or folder of mlagen/;
# "mlagen" is the package's own __init__.py.
GROUND = {"errors", "fork_safety", "logs", "monitoring", "paths", "settings", "values"}
DATA = GROUND | {"artifacts", "spec"}
STAGES = {"codegen", "compiler", "cache", "runtime"}
ENGINE = DATA | STAGES | {"engine", "jit", "recording"}
API_MODULES = {
    *("cascade", "decode", "distributed", "gqa", "mla", "msa_ops", "sparse", "writers", "xqa"),
}
CALL = {"entry_point", "families", "observe", "torch_ops"}
LAYERS = {
    "errors": set[str](),
    "fork_safety": set[str](),
    "logs": set[str](),
    "monitoring": set[str](),
    "paths": set[str](),
    "settings": {"errors", "logs", "paths"},
    "values": {"errors"},
    "artifacts": {"errors"},
    "spec": {"errors", "values"},
    **dict.fromkeys(STAGES, DATA),
    "jit": GROUND,  # whether a process may compile, and reports of compilations
    "recording": {"cache", "paths"},
    "engine": DATA | STAGES | {"jit", "recording"},
    "families": ENGINE,
    "torch_ops": ENGINE | {"families"},
    "observe": ENGINE | {"families", "torch_ops"},
    "entry_point": ENGINE | {"families", "torch_ops", "observe"},
    "models": {"errors", "paths", "settings", "spec", "values"},
    "prewarming": ENGINE | {"models"},
    "planned": ENGINE | CALL,
    **dict.fromkeys(API_MODULES, ENGINE | CALL | {"planned"}),
    # FlashInfer has some names in two modules.
    "decode": ENGINE | CALL | {"gqa", "mla"},
    "xqa": ENGINE | CALL | {"gqa", "mla"},
    **dict.fromkeys(("msa_ops", "sparse"), ENGINE | CALL | {"gqa"}),
    "distributed": ENGINE | CALL | {"cascade", "mla"},  # decode, exchange and merge
    "ops": ENGINE | API_MODULES | CALL,
    # Calls as a user's own code has them; a warm-up compiles and loads as prewarming does.
    "integrations": ENGINE | API_MODULES | {"mlagen", "models", "ops", "prewarming"},
    "mlagen": ENGINE | API_MODULES | CALL | {"ops", "prewarming"},
    "cache_tools": ENGINE | API_MODULES | CALL | {"models", "prewarming"},
}

# Each third party with the layers that may import it.
FENCES = {
    "click": {"cache_tools"},
    "cuda": {"compiler", "runtime"},
    "filelock": {"cache"},
    "huggingface_hub": {"models"},
    "jinja2": {"codegen"},
    "packaging": {"cache", "compiler", "integrations"},
    "rich": {"cache_tools"},
    "sglang": {"integrations"},
    "tomli": {"prewarming"},  # stands in for tomllib, which Python has from 3.11 on
    "tomllib": {"prewarming"},
    "torch": {"integrations", "ops", "runtime"} | API_MODULES | CALL | {"planned"},
    "transformers": {"integrations"},
    "vllm": {"integrations"},
}
# A cache hit digests the templates without importing Jinja, and names NVRTC without loading it. The
# demo and the benchmark create tensors, and the benchmark uses optional packages.
CLOSED = {
    "mlagen/codegen/sources.py": {"jinja2"},
    "mlagen/compiler/process.py": {"cuda"},
    "mlagen/compiler/toolchain.py": {"cuda"},
}
OPEN = {
    "cache_tools/commands/bench.py": {"torch"},
    "cache_tools/commands/demo.py": {"torch"},
    "cache_tools/tools/disassembly.py": {"cuda"},  # cuda.pathfinder, which finds programs too
    "cache_tools/tools/remote.py": {"fsspec"},  # torch depends on it; only push and pull use it
    **{
        f"cache_tools/benchmark/{name}.py": {"torch"}
        for name in (
            *("calls", "gpu", "inputs", "pools", "rows", "timing"),
            *(f"baselines/{name}" for name in ("baseline", "fa3", "flashmla", "hpc", "triton")),
        )
    },
    "cache_tools/benchmark/baselines/flashinfer.py": {"flashinfer", "torch"},
    "cache_tools/benchmark/plot.py": {"matplotlib"},
    **{f"cache_tools/replay/{name}.py": {"torch"} for name in ("dump", "run")},
}

FILES = {
    str(path.relative_to(ROOT)): path
    for folder in ("mlagen", "cache_tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


class Import(NamedTuple):
    """One imported name, spelled out, and the dots it was written with."""

    name: tuple[str, ...]
    dots: int


def layer_of(parts: tuple[str, ...]) -> str:
    """Return the layer of a dotted name, such as ``("mlagen", "cache", "key")``."""
    if parts[0] == "cache_tools" or len(parts) == 1:
        return parts[0]
    module = ROOT.joinpath(*parts[:2])
    is_module = module.is_dir() or module.with_suffix(".py").is_file()
    return parts[1] if is_module else "mlagen"  # else a name that mlagen/__init__.py defines


def imports_of(file: str) -> Iterator[Import]:
    """Yield everything that ``file`` imports, wherever in the file."""
    package = Path(file).parent.parts
    for node in ast.walk(ast.parse(FILES[file].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (Import(tuple(name.name.split(".")), 0) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = (*start, *(node.module.split(".") if node.module else ()))
            yield from (Import((*module, name.name), node.level) for name in node.names)


def own_layer(file: str) -> str:
    """Return the layer that ``file`` belongs to."""
    parts = Path(file).with_suffix("").parts
    return layer_of(parts[:-1] if parts[-1] == "__init__" else parts)


def test_a_layer_imports_only_the_layers_of_its_row() -> None:
    """A file has a layer, and imports it and the ones its row names, by any import statement."""
    above = {
        (file, ".".join(name))
        for file in FILES
        for name, _ in imports_of(file)
        if name[0] in {"mlagen", "cache_tools"}
        and layer_of(name) not in LAYERS[own_layer(file)] | {own_layer(file)}
    }

    # The version belongs to the installation, not to a layer.
    assert {found for found in above if found[1] != "mlagen.__version__"} == set()


def test_third_parties_stay_behind_their_fences() -> None:
    """Only the layers that own a third party import it, and no file imports an undeclared one."""
    found = {}
    for file in FILES:
        third = {name[0] for name, _ in imports_of(file)}
        third -= sys.stdlib_module_names | {"mlagen", "cache_tools"}
        allowed = {name for name, layers in FENCES.items() if own_layer(file) in layers}
        allowed = (allowed | OPEN.get(file, set())) - CLOSED.get(file, set())
        found[file] = third - allowed

    assert {file: names for file, names in found.items() if names} == {}


def test_cache_tools_imports_itself_relatively() -> None:
    """The command line works under both its names: at the top of a checkout, and installed."""
    files = [file for file in FILES if own_layer(file) == "cache_tools"]
    absolute = {(file, name) for file in files for name, dots in imports_of(file) if dots == 0}

    assert files
    assert {found for found in absolute if "cache_tools" in found[1][:2]} == set()


# Runs in a fresh interpreter and reports the effects of `import mlagen` from audit events.
IMPORT_MLAGEN = """
import json, os, sys
events = []
recorders = [lambda event, arguments: events.append((event, arguments))]
sys.addaudithook(lambda *event: [record(*event) for record in recorders])
before = set(sys.modules)
import mlagen
recorders.clear()
opened = [arguments for event, arguments in events if event == "open"]
print(json.dumps({
    "read": [os.path.abspath(str(path)) for path, _, flags in opened],
    "written": [str(path) for path, _, flags in opened if flags & (os.O_WRONLY | os.O_RDWR)],
    "events": sorted({event for event, _ in events}),
    "modules": sorted(set(sys.modules) - before),
}))
"""


@pytest.fixture(scope="module")
def bare_import() -> dict[str, list[str]]:
    """Import mlagen in a fresh interpreter and report its effects."""
    command = [sys.executable, "-B", "-c", IMPORT_MLAGEN]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    report: dict[str, list[str]] = json.loads(run.stdout)
    return report


@pytest.mark.parametrize("package", FENCES)
def test_importing_mlagen_loads_no_third_party(
    package: str, bare_import: dict[str, list[str]]
) -> None:
    """`import mlagen` loads neither torch nor Jinja nor the CUDA bindings nor any tool."""
    loaded = {name.partition(".")[0] for name in bare_import["modules"]}

    assert package not in loaded


def test_importing_mlagen_reads_python_files_only(bare_import: dict[str, list[str]]) -> None:
    """`import mlagen` opens files of the package and of the Python installation, none to write."""
    installation = {Path(sys.prefix), Path(sys.base_prefix), Path(sysconfig.get_path("stdlib"))}
    installation |= {Path(sysconfig.get_path("purelib")), ROOT}

    foreign = [path for path in bare_import["read"] if not installation & {*Path(path).parents}]

    assert foreign == []
    assert bare_import["written"] == []


def test_importing_mlagen_starts_and_loads_nothing(bare_import: dict[str, list[str]]) -> None:
    """`import mlagen` makes no folder, starts no process, loads no library, opens no socket."""
    effects = ("ctypes.dlopen", "os.mkdir", "os.rename", "os.system", "socket.", "subprocess.")

    assert [event for event in bare_import["events"] if event.startswith(effects)] == []


# What a process does, and a package or library that it leaves alone.
PROCESSES = {
    "the digest of a kernel": (
        "from mlagen.codegen.sources import template_inputs; "
        "template_inputs('kernels/combine/kernel.cu.j2')"
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
