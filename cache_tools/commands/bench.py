"""`mlagen bench`: kernel time on this GPU against its roofline bound."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlagen.errors import ArgumentError, UnsupportedError

from ..exit_codes import DONE, FAILED
from ..options import names, numbers
from ..progress import bench_progress
from ..report import console, json_option, print_json

if TYPE_CHECKING:
    from ..benchmark.run import Machine

_BACKENDS = ("auto", "fa3", "fa2")


@click.command()
@click.option(
    "--family",
    "families",
    callback=names,
    metavar="NAME,...",
    help="mla or gqa; default: both, or mla with any case option.",
)
@click.option("--batch", callback=numbers(1), metavar="N,...", help="Requests; default: 128.")
@click.option(
    "--seq-len",
    callback=numbers(1),
    metavar="N,...",
    help="Cached tokens per request; default: 4096.",
)
@click.option(
    "--heads", callback=numbers(1), metavar="N,...", help="Query heads; default: 128, for GQA 64."
)
@click.option(
    "--kv-heads", callback=numbers(1), metavar="N,...", help="KV heads, for GQA; default: 8."
)
@click.option(
    "--head-dim",
    callback=numbers(1),
    metavar="N,...",
    help="Head dim, for GQA; default: 128.",
)
@click.option(
    "--q-len", callback=numbers(1), metavar="N,...", help="Query tokens per request; default: 1."
)
@click.option(
    "--page-size", callback=numbers(1), metavar="N,...", help="Tokens per page; default: 64."
)
@click.option(
    "--dtype",
    callback=names,
    metavar="DTYPE,...",
    help="Dtype of the query, bf16, fp16 or e4m3; default: bf16.",
)
@click.option(
    "--kv-dtype",
    callback=names,
    metavar="DTYPE,...",
    help="Dtype of the KV cache; default: that of the query.",
)
@click.option(
    "--ragged", is_flag=True, help="Random lengths with mean --seq-len, equal in every run."
)
@click.option("--compare", is_flag=True, help="Also measure the installed FlashInfer.")
@click.option(
    "--backend",
    type=click.Choice(_BACKENDS),
    help="Backend of FlashInfer's MLA wrapper, with --compare; default: auto.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE.png",
    help="Draw a roofline; needs matplotlib.",
)
@json_option
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    *,
    families: list[str] | None,
    ragged: bool,
    compare: bool,
    backend: str | None,
    plot: Path | None,
    as_json: bool,
    **axes: Sequence[object] | None,
) -> None:
    """Benchmark decode calls against the GPU's roofline bound.

    Without the case options, --batch to --ragged, the default cases of MLA and GQA run; with
    them, every combination of their values.

    A time is the median over replays of a CUDA graph of whole calls, with inputs that are not in
    L2. The first result of a case is compared with fp32. Exits with 1 if a result is wrong or
    missing.
    """
    from ..benchmark.roofline_plot import require_plot, write_plot
    from ..benchmark.run import run_cases
    from ..benchmark.selection import select_cases
    from ..benchmark.table import all_right, print_results, problems_of

    given = {axis: values for axis, values in axes.items() if values is not None}
    cases = select_cases(families, given, is_ragged=ragged)
    if backend is not None and not compare:
        raise ArgumentError(f"backend: expected --compare with it, got {backend}")
    if plot is not None:
        require_plot(plot)
    if compare:
        _require_flashinfer()
    machine = _machine((backend or _BACKENDS[0]) if compare else None)
    with bench_progress() as on_step:
        document = run_cases(cases, machine, on_step)
    text = console(stderr=True)
    if as_json:
        print_json(document)
    else:
        print_results(document)
    for problem in problems_of(document):
        text.print(problem, soft_wrap=True)
    if plot is not None:
        write_plot(document, plot)
        text.print(f"roofline: {plot}", soft_wrap=True)
    ctx.exit(DONE if all_right(document) else FAILED)


def _require_flashinfer() -> None:
    if find_spec("flashinfer") is None:
        raise UnsupportedError(
            "compare: expected FlashInfer to be installed, got none; "
            "run: pip install flashinfer-python, or omit --compare"
        )


def _machine(flashinfer_backend: str | None) -> Machine:
    """Return the current GPU as the measuring machine.

    Raises
    ------
    UnsupportedError
        If there is none, or torch does not detect it.
    ArgumentError
        If no kernel supports it.
    """
    from mlagen.runtime.device import visible_devices
    from mlagen.spec.arch import arch_of_capability

    gpus = visible_devices()
    if not gpus:
        raise UnsupportedError("device: expected a GPU to measure, got none")
    arch_of_capability(gpus[0].major, gpus[0].minor)  # rejects an unsupported GPU
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"torch: expected a CUDA build that detects the GPU, got {torch.__version__}"
        )
    from ..benchmark.gpu import Gpu

    return Gpu(flashinfer_backend)
