"""Kernel selection options of `mlagen prewarm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..tools.completion import arch_names, complete_spec, completer, family_names, model_names
from .options import names, numbers, values_option

if TYPE_CHECKING:
    from ..output.report import Command

_OPTIONS = (
    values_option(
        "arch",
        names,
        "ARCH",
        "Targets such as sm_90a, or GPUs such as H100; native: the visible GPUs (default).",
        parameter="archs",
        shell_complete=completer(lambda: ["native", *arch_names()]),
    ),
    values_option(
        "model",
        names,
        "NAME|PATH",
        "Kernels of these models: names such as deepseek-v3, Hub ids or config.json paths.",
        parameter="models",
        shell_complete=completer(model_names),
    ),
    values_option("tp", numbers(1), "N", "Tensor-parallel size of a model; default: 1."),
    values_option(
        "dcp",
        numbers(1),
        "N",
        "Decode-context-parallel size of an MLA model, a divisor of --tp; default: 1.",
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
    values_option(
        "family",
        names,
        "NAME",
        "Kernel families, such as mla_sm80.",
        parameter="families",
        shell_complete=completer(family_names),
    ),
    values_option("dtype", names, "DTYPE", "Element types of the queries, such as bf16."),
    values_option("kv-dtype", names, "DTYPE", "Element types of the KV cache, such as e4m3."),
    values_option(
        "page-size",
        numbers(1),
        "N",
        "Tokens per page of the KV cache; default of a model: see mlagen models.",
    ),
    values_option("kv-lora-rank", numbers(1), "N", "Latent dims (ckv) of a cached token."),
    values_option("head-dim", numbers(1), "N", "Head dim, for GQA."),
    values_option("lookup", names, "HOW", "paged (the default), sparse or two_pools, for MLA."),
    values_option("values", names, "HOW", "shared (the default) or separate, for MLA."),
    values_option("mask", names, "HOW", "causal (the default), dcp or bias, for MLA."),
    values_option("qk-rope-head-dim", numbers(0), "N", "Rope dims (kpe) of a cached token."),
    values_option(
        "heads", numbers(1), "N", "Query heads per GPU: only the tile sizes of such calls."
    ),
    values_option("kv-heads", numbers(1), "N", "KV heads per GPU, with --heads, for GQA."),
    values_option(
        "q-len", numbers(1), "N", "Query tokens per request, with --model or --heads; default: 1."
    ),
)


def selection_options(command: Command) -> Command:
    """Add the kernel selection options, in the order of the help."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
