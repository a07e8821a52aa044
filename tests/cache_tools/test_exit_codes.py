"""Exit codes of every command: bad usage and errors are one line, and change nothing."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click
import pytest

import mlagen
from cache_tools.cli import cli
from cache_tools.options import exit_codes
from cache_tools.options.exit_codes import CACHE_UNUSABLE, FAILED, UNSUPPORTED, USAGE
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.runtime import device
from mlagen.spec.families import FAMILIES
from tests.cache.bundle_cases import bundle_bytes, filled_store, key_for
from tests.fake_machine import results
from tests.fixture_types import Patch
from tests.kernels import COMBINE, mla_sm90

from .altered import snapshot
from .conftest import ROOT, Setting, raising, run

KEY = key_for("combine").digest
NOT_CACHED = "key: expected a prefix of a cached key (mlagen cache ls), got "
PULL = "cache pull there.tar.gz"
FAMILY = f"kernel: expected a family out of {', '.join(FAMILIES)}"
NEAREST = "mla_sm90: expected a kernel that calls use, the nearest"
OF_MLA = "no MLA decode kernel for query bf16,"
NUMBERS = "expected numbers from 1 to 2147483647, with commas, got "

# Words of a command line in a folder with a bundle, and the start of the last line on stderr.
BAD_USAGE = {
    "--no-such": "No such option '--no-such'; see: mlagen --help",
    "no-such": "No such command 'no-such'; see: mlagen --help",
    "--cache-dir= cache dir": "cache-dir: ",
    "--cache-dir there.tar.gz cache dir": "Invalid value for '--cache-dir': ",
    "cache ls --older-than soon": "older-than: expected an age such as 90min",
    "cache show 123456": f"{NOT_CACHED}123456",
    "cache show 123456 --source --log": "part: expected one, got --source and --log; see: ",
    "cache why abcdef": f"{NOT_CACHED}abcdef",
    "cache why abc": "kernel: expected a family out of mla_sm80, mla_sm90, ",
    f"cache rm {KEY} 123456": f"{NOT_CACHED}123456",
    "cache rm": "Missing argument 'KEY...'; see: mlagen cache rm --help",
    "cache prune": "prune: expected an option that selects kernels, got none",
    "cache prune --older-than -1d": "older-than: expected an age such as 90min",
    "cache prune --max-size big": "max-size: expected a size such as 500M or 2GiB, got 'b",
    "cache prune --arch sm_1": "arch: expected one of sm_80, ",
    "cache export k.tar.gz --arch sm_80": "arch: expected a cached one (sm_90a), got 'sm_",
    "cache export k.tar.gz --family gqa_sm90": "family: expected a cached one (combine, mla_sm80)",
    "cache export k.tar.gz --toolchain nvrtc-1": "toolchain: expected a cached one (",
    "cache export k.tar.gz --wheel-version 1.5": "wheel-version: ",
    "cache export . --wheel mlagen": "wheel: expected a name of its own such as acme-",
    "cache export . --wheel k --wheel-version abc": "wheel-version: expected one such as ",
    "cache import there.tar.gz --expect-sha256 abc": "expect-sha256: expected 64 hex digit",
    "cache import there.tar.gz --max-size much": "max-size: expected a size such as 500M ",
    f"{PULL} --expect-sha256 00": "expect-sha256: expected 64 hex digits, got '00'; see: ",
    "cache pull https://me:secret@127.0.0.1:9/k": "url: expected one without user and password, ",
    "cache push https://me:secret@host/k?sign=x": "url: expected one that can be written, ",
    "kernel show foo": "kernel: expected a family out of mla_sm80, ",
    "kernel show mla_sm91": f"{FAMILY}, got 'mla_sm91', did you mean mla_sm90?",
    "kernel show mla_sm90-64": "kernel: expected family(name=value, ...), got 'mla_sm90-64'",
    "kernel show mla_sm90(rows=1)": "mla_sm90: expected name=value with a name out of arch, ",
    "kernel show mla_sm90(block_m=48)": f"{NEAREST} mla_sm90(arch=sm_90a, ",
    "kernel show mla_sm90(kv_dtype=e4m3)": f"{NEAREST} mla_sm90(arch=sm_90a, ",
    "kernel show mla_sm90 --arch sm_80": "arch: expected sm_90a for mla_sm90, got sm_80",
    "kernel show MLA --arch sm_80": "arch: expected sm_90a for mla_sm90, got sm_80",
    "kernel show combine --arch H9": "arch: expected one of sm_80, ",
    "kernel show combine --ptx --sass": "part: expected one, got --ptx and --sass; see: ",
    "prewarm --arch sm_70": "arch: expected one of sm_80, ",
    "prewarm --arch sm_80 --page-size 48": "page_size: expected one of 1, 8, ",
    "prewarm --arch sm_80 -j 0": "jobs: expected an int, 1 or more, got 0",
    "prewarm --arch sm_80 --q-len 2": "q_len: expected heads beside it, got [2]",
    "prewarm --heads 16,x": f"heads: {NUMBERS}'16,x'",
    f"bench --batch {'9' * 5000}": f"batch: {NUMBERS}'999",
    "prewarm --page-size 64,big": f"page-size: {NUMBERS}'64,big'",
    "prewarm extra": "file: expected one that ends with .toml or .json, got 'extra'",
    "prewarm --arch sm_80 --tp 8": "tp: expected none without models, got [8]",
    "prewarm --model gpt-5 --arch sm_80": "model: expected the path of a config.json or ",
    "prewarm --model deepseek-v3 --kv-dtype int8 --arch sm_90a": "deepseek-v3: no MLA dec",
    "prewarm --kernel x": "kernel: expected family(name=value, ...), got 'x'",
    "prewarm --timeout 9": "timeout: expected --isolate with it, got it alone",
    "prewarm --kernel x --arch sm_80": "arch: expected none with --kernel, whose",
    "prewarm --kernel COMBINE --dry-run --bundle x": "bundle: expected none with --dry-run",
    "prewarm --from-log empty.jsonl --bundle x": "bundle: expected kernels, got none for x",
    "prewarm none.toml": "none.toml: expected a readable file, got No such file or dir",
    "prewarm endless.toml": "endless.toml: expected a readable file, got a device",
    "prewarm --from-log none": "none: expected a readable file, got No such file or dir",
    "prewarm --from-log endless.toml": "endless.toml: expected a readable file, got a device",
    "prewarm --model endless.toml": "model: expected a readable config.json, got a device: ",
    "bench --family mha": "family: expected mla or gqa, got mha",
    "bench --family mla --kv-heads 8": "kv_heads: expected family gqa with it, got family mla",
    "bench --head-dim 64": "head_dim: expected family gqa with it, got family mla",
    "bench --family gqa --top-k 64 --sparse-block 64": "sparse_block: expected ",
    "bench --family gqa --qk-rope-head-dim 0": "qk_rope_head_dim: expected family mla with it",
    "bench --top-k 64 --seq-len 63": "top_k: expected at most 63 (seq_len) and equal ",
    "bench --family gqa --heads 20": "heads: expected a multiple of 8 (kv_heads), got 20",
    "bench --seq-len 2 --q-len 4": "seq_len: expected 4 (q_len) or more, got 2",
    "bench --dtype fp32": "dtype: expected one of bf16, fp16, e4m3, got fp32",
    "bench --kv-dtype fp32": "kv_dtype: expected one of bf16, fp16, e4m3, fp8_ds_mla, ",
    "bench --filter (": "filter: expected a regular expression, got (",
    "bench --filter none": "filter: expected a regular expression that matches a name such as '",
    "bench --from-json nowhere": "from-json: expected a file of mlagen bench --json, got none: no",
    "bench --mode hot": "mode: expected one of fresh, sustained, model, layer, got hot",
    "bench --compare cutlass": "compare: expected one of flashinfer, flashmla, fa3, hpc, triton, ",
    "bench --libraries site": "libraries: expected --compare with it, got site",
    "bench --suite full --heads 8": "suite: expected no case option with it, got full",
    "bench --tolerance 3": "tolerance: expected a percentage such as 3%, got 3",
    "bench --baseline none": "baseline: expected a file of mlagen bench --json, got none",
    "bench --from-json deep.json --json": "from-json: expected results of mlagen bench --json, ",
    "bench --from-json nan.json --json": "from-json: nan.json.cases[0].mlagen.us: expected a fin",
    "bench --baseline nan.json": "baseline: nan.json.cases[0].mlagen.us: expected a finite numb",
    "bench --from-json none --compare": "compare: expected a measurement with it, got --fr",
    "bench --plot a.pdf": "plot: expected a name that ends in .svg or .png, got a.pdf",
    "bench --plot .svg/": "plot: expected a name that ends in .svg or .png, got .svg",
    "bench --plot none/a.svg": "plot: expected a file in a writable folder, got none/a.svg",
}
FAILURES = {
    "prewarm --kernel COMBINE --bundle no/x": "bundle: expected a file in a folder that exists",
    "prewarm --kernel COMBINE --bundle fifo": "bundle: expected a file, got another kind: fifo",
    f"prewarm --kernel COMBINE --bundle {'x' * 300}": "bundle: expected a writable file, got F",
    "cache export none/k.tar.gz": "bundle: expected a file in a folder that exists, got n",
    "cache export there.tar.gz --wheel acme": "wheel: expected a folder, got File exists",
    "cache import none.tar.gz": "bundle: expected a file, got No such file or directory: ",
    f"cache import there.tar.gz --expect-sha256 {KEY}": f"bundle: expected sha256 {KEY}, ",
    "cache import there.tar.gz --max-size 1K": "bundle: expected at most 1024 bytes in total",
    f"{PULL} --expect-sha256 {KEY}": f"bundle: expected sha256 {KEY}, got ",
    "cache pull fifo": "url: a FIFO: fifo",
    "cache pull https://me:secret/x@127.0.0.1/k": "url: nonnumeric port: '...': https://...",
    "cache pull http://127.0.0.1:9/k?s=secret\x01": "url: URL can't contain control characters. ",
    "cache pull file://fifo": "url: a FIFO: file://fifo",
    f"{PULL} --max-size 100": "url: expected at most 100 bytes, got more: ",
    "cache push file://none/k.tar.gz": "bundle: expected a file in a folder that exists",
}
UNSUPPORTED_HERE = {
    "prewarm": "arch: expected a supported GPU for native, got none; name targets instead",
    "bench": "device: expected a GPU to measure, got none; --from-json FILE shows earlie",
    "MLAGEN_TOOLCHAIN=nvrtc-9.1.2 kernel show combine": (
        "MLAGEN_TOOLCHAIN: expected NVRTC, which is installed, got nvrtc-9.1.2"
    ),
    "bench --kv-dtype fp16": f"{OF_MLA} cache fp16; ",
    "bench --kv-dtype int8": f"{OF_MLA} cache int8; ",
    "bench --qk-rope-head-dim 32": f"{OF_MLA} cache bf16, (kv_lora_rank, qk_rope_head_dim) ",
    "bench --family gqa --dtype e4m3": "no GQA decode kernel for query e4m3, cache e4m3, ",
    "bench --family gqa --head-dim 320": "no GQA decode kernel for head_dim 320; ",
    "bench --plot a.png": "plot: expected matplotlib to be installed, got none; run: pip",
}
UNUSABLE = {
    f"MLAGEN_CACHE_DIR=there.tar.gz {line}": "cache: expected a writable folder"
    for line in ("cache import there.tar.gz", "prewarm --kernel COMBINE")
}
CASES = [
    (line, code, message)
    for code, cases in (
        *((USAGE, BAD_USAGE), (FAILED, FAILURES)),
        *((UNSUPPORTED, UNSUPPORTED_HERE), (CACHE_UNUSABLE, UNUSABLE)),
    )
    for line, message in cases.items()
]
STEPS = {"packing", "uploading", "verifying", "downloading", "publishing"}


@pytest.mark.parametrize(("line", "code", "message"), CASES, ids=lambda case: str(case)[:60])
def test_what_cannot_be_done_is_one_line_and_changes_nothing(
    line: str, code: int, message: str, tmp_path: Path, monkeypatch: Patch, setting: Setting
) -> None:
    """Errors have one format on stderr, whether of click, a command, a cache or a compiler."""
    (tmp_path / "there.tar.gz").write_bytes(bundle_bytes(filled_store(tmp_path)))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "deep.json").write_text("[" * 200_000)
    times = json.dumps(results()).replace('"us": 1000.0', '"us": NaN')
    (tmp_path / "nan.json").write_text(times)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "endless.toml").symlink_to("/dev/zero")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(device, "visible_devices", list)
    monkeypatch.setattr("mlagen.prewarming.machine.visible_devices", list)
    before = snapshot(tmp_path)

    named = {"COMBINE": str(COMBINE), "MLA": str(mla_sm90())}
    words = [named.get(word, word) for word in line.split()]
    if words[0].startswith("MLAGEN_"):
        setting(*words.pop(0).split("="))

    result = run(*words)

    *progress, last = result.stderr.splitlines()
    last = last.replace("option: --no-such;", "option '--no-such';")  # click 8.1
    message = message.replace("NVRTC", str(find_nvrtc()))
    assert last.lower().startswith(f"mlagen: {message}".lower())
    assert (result.exit_code, result.stdout) == (code, "")
    assert {step.split()[0] for step in progress} <= STEPS
    assert "secret" not in result.stderr
    assert snapshot(tmp_path) == before


RULE = "x: expected 1, got 2"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (mlagen.ArgumentError(RULE), 2, RULE),
        (mlagen.ToolchainError(RULE), 3, RULE),
        (mlagen.UnsupportedError(RULE), 3, RULE),
        (mlagen.CacheError(RULE, path=Path("x")), 4, RULE),
        (mlagen.DriverError(RULE, symbol="x"), 1, RULE),
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.Abort(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_is_one_line_and_an_exit_code(
    error: BaseException, code: int, message: str, monkeypatch: Patch
) -> None:
    """Every MlagenError, and an interrupt, ends the command without a traceback."""
    monkeypatch.setitem(cli.commands, "fail", click.Command("fail", callback=raising(error)))
    result = run("fail")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"mlagen: {message}\n")


def test_every_exit_code_is_documented() -> None:
    """The page on the environment has a row for each code."""
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    codes = [value for name, value in vars(exit_codes).items() if name.isupper() and name[0] != "_"]
    assert len(codes) == 8
    assert [code for code in codes if f"\n| {code} |" not in page] == []
