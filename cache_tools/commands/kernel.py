"""`mlagen kernel`: kernels without a call."""

from __future__ import annotations

import click

from .kernel_show import show


@click.group()
def kernel() -> None:
    """Show a kernel, without a call and without a GPU.

    SPEC is a kernel as in messages, logs and the output of other commands, such as
    'combine(arch=sm_90a, dtype=bf16, head_dim_vo=512)'. Names may be left out: `mla_sm90` and
    'mla_sm90(block_m=16)' are kernels with default values otherwise.
    """


kernel.add_command(show)
