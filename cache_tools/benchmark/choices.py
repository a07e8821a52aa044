"""Values of options: states of the GPU, and libraries to compare with."""

from __future__ import annotations

# fresh: the clock of an idle GPU. sustained: after half a second of the same calls, when power
# decides the clock. model: behind the projection of a decode layer, whose own time is subtracted.
MODES = ("fresh", "sustained", "model")

LIBRARIES = ("flashinfer", "flashmla", "fa3")
