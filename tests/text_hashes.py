"""SHA-256 of the `.text` section of every kernel, which proves that a rename changes no SASS.

    python3 -m tests.text_hashes --out before.json [--arch sm_90a] [--every 20]
    python3 -m tests.text_hashes --against before.json

The kernels of the file are compiled again: each by its spec, or where it has another name now, by
its place in the list of all specs. The NVRTC must be that of the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mlagen.codegen.render import render
from mlagen.compiler.nvrtc import compile_source
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.errors import MlagenError
from mlagen.spec.arch import ARCHS
from mlagen.spec.families import specs_of
from mlagen.spec.kernel import KernelSpec


def text_sections(cubin: bytes) -> dict[str, bytes]:
    """Return the `.text.*` sections of a cubin by name; a cubin is a 64-bit ELF file."""
    (offset,) = struct.unpack_from("<Q", cubin, 40)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [
        struct.unpack_from("<IIQQQQ", cubin, offset + entry_bytes * index) for index in range(count)
    ]
    names = headers[names_index][4]
    found = {}
    for name_offset, _, _, _, begin, size in headers:
        start = names + name_offset
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(".text."):
            found[name] = cubin[begin : begin + size]
    return found


def hash_of(spec: KernelSpec) -> str:
    """Compile a kernel and return the SHA-256 of its `.text`, or the first error."""
    try:
        cubin = compile_source(render(spec), spec.arch, find_nvrtc()).code
    except MlagenError as error:  # the error cannot be pickled
        return str(error)
    (text,) = text_sections(cubin).values()
    return hashlib.sha256(text).hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Compile, write, compare; the exit code is 1 if a hash differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", action="append", help="compile for this one; may be repeated")
    parser.add_argument("--family", action="append", help="compile this one; may be repeated")
    parser.add_argument("--every", type=int, default=1, help="compile each n-th kernel of the list")
    parser.add_argument("--out", type=Path, help="write the hashes here, as JSON")
    parser.add_argument("--against", type=Path, help="compare with the hashes in this file")
    parser.add_argument("--jobs", type=int, help="processes; one for each core by default")
    chosen = parser.parse_args(arguments)
    nvrtc = str(find_nvrtc())
    before = json.loads(chosen.against.read_text()) if chosen.against else None
    if before and before["nvrtc"] != nvrtc:
        sys.stderr.write(
            f"--against: expected hashes of {nvrtc}, got those of {before['nvrtc']}" + "\n"
        )
        return 2
    places = {
        f"{arch} {index}": spec for arch in ARCHS for index, spec in enumerate(specs_of(arch))
    }
    named = {str(spec): spec for spec in places.values()}
    todo = {
        place: spec
        for place, spec in places.items()
        if (not chosen.arch or str(spec.arch) in chosen.arch)
        and (not chosen.family or spec.family in chosen.family)
        and int(place.split()[1]) % chosen.every == 0
    }
    if before:
        known = before["kernels"].items()
        todo = {place: named.get(each["spec"]) or places[place] for place, each in known}
    kernels: dict[str, Any] = {}
    changed = []
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        hashes = pool.map(hash_of, todo.values(), chunksize=4)
        for done, ((place, spec), text) in enumerate(zip(todo.items(), hashes, strict=True), 1):
            kernels[place] = {"spec": str(spec), "text": text}
            if before and before["kernels"][place]["text"] != text:
                changed.append(f"{before['kernels'][place]['spec']}\n  now {spec}: {text}")
            if done % 100 == 0:
                sys.stderr.write(f"{done} of {len(todo)}, {len(changed)} changed" + "\n")
    if chosen.out:
        chosen.out.write_text(json.dumps({"nvrtc": nvrtc, "kernels": kernels}, indent=0) + "\n")
    sys.stdout.write(
        "\n".join([*changed, f"{nvrtc}: {len(todo)} kernels, {len(changed)} changed", ""])
    )
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
