"""Kernel selection options of `mlagen prewarm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..tools.completion import arch_names, complete_spec, completer, family_names, model_names
from .options import names, numbers

if TYPE_CHECKING:
    from ..output.report import Command

_OPTIONS = (
    click.option(
        "--arch",
        "archs",
        callback=names,
        metavar="ARCH,...",
        shell_complete=completer(lambda: ["native", *arch_names()]),
        help="Targets such as sm_90a, or GPUs such as H100; native: the visible GPUs (default).",
    ),
    click.option(
        "--model",
        "models",
        callback=names,
        metavar="NAME|PATH,...",
        shell_complete=completer(model_names),
        help="Kernels of these models: names such as deepseek-v3, Hub ids or config.json paths.",
    ),
    click.option(
        "--tp",
        callback=numbers(1),
        metavar="N,...",
        help="Tensor-parallel size of a model; default: 1.",
    ),
    click.option(
        "--dcp",
        callback=numbers(1),
        metavar="N,...",
        help="Decode-context-parallel size of an MLA model, a divisor of --tp; default: 1.",
    ),
    click.option(
        "--kernel",
        "kernels",
        multiple=True,
        metavar="SPEC",
        shell_complete=complete_spec,
        help="One kernel, as in a miss or a record; may be repeated.",
    ),
    click.option(
        "--from-log",
        "logs",
        multiple=True,
        metavar="FILE",
        help="Kernels that runs requested, from a file of MLAGEN_RECORD; may be repeated.",
    ),
    click.option(
        "--family",
        "families",
        callback=names,
        metavar="NAME,...",
        shell_complete=completer(family_names),
        help="Kernel families, such as mla_sm80.",
    ),
    click.option(
        "--dtype",
        callback=names,
        metavar="DTYPE,...",
        help="Element types of the queries, such as bf16.",
    ),
    click.option(
        "--kv-dtype",
        callback=names,
        metavar="DTYPE,...",
        help="Element types of the KV cache, such as e4m3.",
    ),
    click.option(
        "--page-size",
        callback=numbers(1),
        metavar="N,...",
        help="Tokens per page of the KV cache; default of a model: see mlagen models.",
    ),
    click.option(
        "--kv-lora-rank",
        callback=numbers(1),
        metavar="N,...",
        help="Latent dims (ckv) of a cached token.",
    ),
    click.option("--head-dim", callback=numbers(1), metavar="N,...", help="Head dim, for GQA."),
    click.option(
        "--lookup",
        callback=names,
        metavar="HOW,...",
        help="paged (the default) or sparse, for MLA.",
    ),
    click.option(
        "--values",
        callback=names,
        metavar="HOW,...",
        help="shared (the default) or separate, for MLA.",
    ),
    click.option(
        "--mask",
        callback=names,
        metavar="HOW,...",
        help="causal (the default), dcp or bias, for MLA.",
    ),
    click.option(
        "--qk-rope-head-dim",
        callback=numbers(0),
        metavar="N,...",
        help="Rope dims (kpe) of a cached token.",
    ),
    click.option(
        "--heads",
        callback=numbers(1),
        metavar="N,...",
        help="Query heads per GPU: only the tile sizes of such calls.",
    ),
    click.option(
        "--kv-heads",
        callback=numbers(1),
        metavar="N,...",
        help="KV heads per GPU, with --heads, for GQA.",
    ),
    click.option(
        "--q-len",
        callback=numbers(1),
        metavar="N,...",
        help="Query tokens per request, with --model or --heads; default: 1.",
    ),
)


def selection_options(command: Command) -> Command:
    """Add the kernel selection options, in the order of the help."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
