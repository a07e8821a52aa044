// Rescale threshold of the online softmax of mma kernels (FA4 "conditional rescaling").

#pragma once

// P is relative to a stale row max, which moves only when a score exceeds it by this much (base-2
// exponent). Warps then need no common max per tile, O is rarely rescaled, and no element of P
// exceeds 2^8, which fp16 represents.
constexpr float kRescaleThreshold = 8.0f;
