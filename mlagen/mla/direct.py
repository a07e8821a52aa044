"""MLA decode of a call whose arguments another module made: those of the family themselves."""

from __future__ import annotations

from mlagen.entry_point import ALL, entry_point
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.dispatch import MLA

# Requested outputs of the fields of MlaArgs, in order.
run_mla = entry_point(MLA, outputs="out lse", returns=ALL, ignored="names")(MlaArgs)
