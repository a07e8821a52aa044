"""The options of `mlagen prewarm` that say which kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .completion import arch_names, completer, family_names, model_names
from .options import names, numbers

if TYPE_CHECKING:
    from .report import Command

_OPTIONS = (
    click.option(
        "--arch",
        "archs",
        callback=names,
        metavar="ARCH,...",
        shell_complete=completer(lambda: ["native", *arch_names()]),
        help="Targets such as sm_90a, or cards such as H100; native (the default) is those of the "
        "visible GPUs.",
    ),
    click.option(
        "--model",
        "models",
        callback=names,
        metavar="NAME|PATH,...",
        shell_complete=completer(model_names),
        help="What calls of these models take: names such as deepseek-v3, Hub ids of the same, or "
        "paths of a config.json.",
    ),
    click.option(
        "--tp",
        callback=numbers(1),
        metavar="N,...",
        help="On how many GPUs the heads of a model are spread; default: 1.",
    ),
    click.option(
        "--kernel",
        "kernels",
        multiple=True,
        metavar="TEXT",
        help="One kernel, as a miss or a record names it; may be repeated.",
    ),
    click.option(
        "--from-log",
        "logs",
        multiple=True,
        metavar="FILE",
        help="What runs asked for, from a file of MLAGEN_RECORD; may be repeated.",
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
        help="Tokens of a page of the KV cache; default of a model: 64, for GQA 16 and 64.",
    ),
    click.option(
        "--kv-lora-rank",
        callback=numbers(1),
        metavar="N,...",
        help="Latent part of a cached token.",
    ),
    click.option(
        "--head-dim", callback=numbers(1), metavar="N,...", help="Elements of a head, for GQA."
    ),
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
        "--mask", callback=names, metavar="HOW,...", help="causal (the default) or bias, for MLA."
    ),
    click.option(
        "--qk-rope-head-dim",
        callback=numbers(0),
        metavar="N,...",
        help="Rope part of a cached token.",
    ),
    click.option(
        "--heads",
        callback=numbers(1),
        metavar="N,...",
        help="Query heads of a GPU: only the tiles that such calls take.",
    ),
    click.option(
        "--kv-heads",
        callback=numbers(1),
        metavar="N,...",
        help="KV heads of a GPU, beside --heads, for GQA.",
    ),
    click.option(
        "--q-len",
        callback=numbers(1),
        metavar="N,...",
        help="Query tokens of a request, beside --model or --heads; default: 1.",
    ),
)


def selection_options(command: Command) -> Command:
    """Add the options that say which kernels, in the order of the help."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
