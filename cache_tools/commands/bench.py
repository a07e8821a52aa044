"""`mlagen bench`: kernel time on this GPU against its roofline bound and other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.logs import visible

from ..benchmark.suites import LIBRARIES, MODES, SUITES
from ..options.exit_codes import DONE, FAILED
from ..options.options import names, numbers, values_option
from ..output.progress import bench_progress
from ..output.report import console, json_option, print_json

if TYPE_CHECKING:
    from ..benchmark.cases import Case
    from ..benchmark.outcomes import Machine
    from ..output.report import Command

_ALL = "all"  # --compare without a value


# Options that choose cases by numbers: the name, the least number, and the help.
_COUNTS = (
    ("batch", 1, "Requests; default: 128."),
    ("seq-len", 1, "Cached tokens per request; default: 4096."),
    ("heads", 1, "Query heads; default: 128, for GQA 64."),
    ("kv-heads", 1, "KV heads, for GQA; default: 8."),
    ("head-dim", 1, "Head dim, for GQA; default: 128."),
    ("head-dim-vo", 0, "Head dim of values, for GQA; 0: of keys; default: 0."),
    ("q-len", 1, "Query tokens per request; default: 1."),
    ("page-size", 1, "Tokens per page; default: 64."),
    ("qk-rope-head-dim", 0, "For MLA, rope elements of a token, 64 or 0; default: 64."),
    (
        *("top-k", 0),
        "Tokens that a query token chooses, for MLA also its indices; 0 is dense; default: 0.",
    ),
    (
        *("sparse-block", 1),
        "For GQA, tokens that an index names: 1, or 128, which is the page size; default: 1.",
    ),
    (
        *("compress-ratio", 1),
        (
            "DeepSeek-V4: tokens that one of the --top-k stands for, 4 or 128; of V4.1, 1 or 2; "
            "default: 4."
        ),
    ),
    ("window-left", 0, "For GQA, tokens before its own that a row attends to; default: all."),
    ("soft-cap", 0, "For GQA, soft cap of the scores; 0 is none; default: 0."),
)
# Options that choose cases by their values.
_CASE_OPTIONS = (
    values_option(
        "family",
        names,
        "NAME",
        "mla or gqa; default: both, or mla with any case option.",
        parameter="families",
    ),
    click.option(
        "--filter",
        "pattern",
        metavar="REGEX",
        help="Only cases whose name this regular expression matches, such as 'top-k|512\\+0'.",
    ),
    *(values_option(name, numbers(least), "N", text) for name, least, text in _COUNTS),
    values_option(
        "dtype", names, "DTYPE", "Dtype of the query, bf16, fp16 or e4m3; default: bf16."
    ),
    values_option(
        "kv-dtype",
        names,
        "DTYPE",
        "Dtype of the KV cache, also fp8_ds_mla, fp8_dsv4, int8, int8_per_token_head or nvfp4; "
        "default: that of the query.",
    ),
    click.option(
        "--ragged", is_flag=True, help="Random lengths with mean --seq-len, equal in every run."
    ),
    values_option(
        "mode",
        names,
        "MODE",
        f"State of the GPU: {', '.join(MODES)}; default: {MODES[0]}.",
        parameter="modes",
    ),
    click.option(
        "--compare",
        callback=names,
        is_flag=False,
        flag_value=_ALL,
        metavar="[NAME,...]",
        help="Also measure flashinfer, flashmla, fa3, hpc, triton; without a name, all found.",
    ),
)


def _case_options(command: Command) -> Command:
    for option in reversed(_CASE_OPTIONS):
        command = option(command)
    return command


def _path_option(name: str, metavar: str, text: str) -> Callable[[Command], Command]:
    return click.option(f"--{name}", type=click.Path(path_type=Path), metavar=metavar, help=text)


@click.command()
@click.option("--suite", type=click.Choice(list(SUITES)), help="Cases to measure; default: quick.")
@_case_options
@_path_option(
    "libraries", "DIR", "Folder of `pip install --target` with the libraries of --compare."
)
@_path_option(
    *("from-json", "FILE"),
    "Show earlier results, of the chosen cases and --mode if given; needs no GPU.",
)
@_path_option("plot", "FILE", "Draw bars into an .svg or .png; needs matplotlib.")
@_path_option("baseline", "FILE", "Earlier results; exit with 1 if a case is slower.")
@click.option(
    "--tolerance",
    default="3%",
    metavar="PERCENT",
    help="Slowdown that --baseline allows; default: 3%.",
)
@json_option
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    *,
    suite: str | None,
    families: list[str] | None,
    pattern: str | None,
    ragged: bool,
    modes: list[str] | None,
    compare: list[str] | None,
    libraries: Path | None,
    from_json: Path | None,
    plot: Path | None,
    baseline: Path | None,
    tolerance: str,
    as_json: bool,
    **axes: Sequence[object] | None,
) -> None:
    """Benchmark decode calls against the GPU's roofline bound.

    Without the case options, --batch to --ragged, the cases of a suite run; with them, every
    combination of their values.

    A time is the median over replays of a CUDA graph of whole calls, with inputs that are not in
    L2. fresh: at the clock of an idle GPU. sustained: after half a second of the same calls, when
    power decides the clock. model: behind the projection of a decode layer, whose own time is
    subtracted. layer: the same behind all other kernels of one. The first result of a case is
    compared with fp32.

    Exits with 1 if a result of mlagen is wrong or missing, or slower than --baseline allows.
    """
    from ..benchmark.comparison import changes_since, parse_tolerance, read_document
    from ..benchmark.plot import require_plot, write_plot
    from ..benchmark.selection import select_cases
    from ..benchmark.table import all_right, print_changes, print_results, problems_of

    given = {axis: values for axis, values in axes.items() if values is not None}
    _require_known("mode", modes, MODES)
    _require_known("compare", compare, (*LIBRARIES, _ALL))
    if suite is not None and (given or ragged):
        raise ArgumentError(f"suite: expected no case option with it, got {suite}")
    if libraries is not None and compare is None:
        raise ArgumentError(f"libraries: expected --compare with it, got {libraries}")
    cases = select_cases(families, given, is_ragged=ragged, suite=suite or "quick", pattern=pattern)
    allowed = parse_tolerance(tolerance)
    earlier = None if baseline is None else read_document("baseline", baseline)
    if plot is not None:
        require_plot(plot)
    if from_json is not None:
        is_chosen = suite or families is not None or given or ragged or pattern is not None
        document = _read_results(from_json, cases if is_chosen else None, modes, compare)
    else:
        document = _measure(cases, modes or list(MODES[:1]), compare, libraries)
    changes = None if earlier is None else changes_since(earlier, document)
    text = console(stderr=True)
    if as_json:
        print_json(document)
    elif changes is None:
        print_results(document)
    else:
        print_changes(changes, allowed)
    for problem in problems_of(document):
        text.print(visible(problem, kept=""), soft_wrap=True)
    if plot is not None:
        write_plot(document, plot)
        text.print(f"plot: {plot}", soft_wrap=True)
    worse = [c for c in changes or () if c.verdict(allowed) in {"slower", "missing"}]
    for change in worse:
        line = visible(f"{change.verdict(allowed)}: {change}", kept="")
        text.print(line, soft_wrap=True)
    ctx.exit(DONE if all_right(document) and not worse else FAILED)


def _require_known(option: str, given: list[str] | None, known: tuple[str, ...]) -> None:
    for name in given or ():
        if name not in known:
            raise ArgumentError(f"{option}: expected one of {', '.join(known)}, got {name}")


def _read_results(
    path: Path, cases: list[Case] | None, modes: list[str] | None, compare: list[str] | None
) -> dict[str, Any]:
    from ..benchmark.comparison import choose_rows, read_document

    if compare is not None:
        raise ArgumentError("compare: expected a measurement with it, got --from-json")
    return choose_rows(read_document("from-json", path), cases, modes)


def _measure(
    cases: list[Case], modes: list[str], compare: list[str] | None, libraries: Path | None
) -> dict[str, Any]:
    from ..benchmark.outcomes import run_cases

    machine = _machine(compare, libraries)
    with bench_progress() as on_step:
        return run_cases(cases, machine, on_step, modes)


def _machine(compare: list[str] | None, libraries: Path | None) -> Machine:
    """Return the current GPU as the measuring machine.

    Raises UnsupportedError if there is none, torch does not detect it, or a library to compare with
    is not found; ArgumentError if no kernel supports it.
    """
    from mlagen.runtime.device import visible_devices
    from mlagen.spec.arch import arch_of_capability

    gpus = visible_devices()
    if not gpus:
        raise UnsupportedError(
            "device: expected a GPU to measure, got none; --from-json FILE shows earlier results"
        )
    arch_of_capability(gpus[0].major, gpus[0].minor)  # rejects an unsupported GPU
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"torch: expected a CUDA build that detects the GPU, got {torch.__version__}"
        )
    from ..benchmark.baselines import find_baselines
    from ..benchmark.gpu import Gpu

    if compare is None:
        return Gpu()
    return Gpu(find_baselines([] if compare == [_ALL] else compare, libraries))
