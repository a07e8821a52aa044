// Scores of a QK thread, and the limits of P.

#pragma once

#include "common/types.cuh"
#include "config.cuh"

// A thread holds two of every eight adjacent rows, and of a warp's 16 tokens g and g + 8 with
// g = lane / 4.
using Scores = float[kBlockM / 2];

// Max offset: an update of the row max makes the largest probability of a row 2^6, in fp16. The
// next update is due when a probability exceeds 2^14.
constexpr float kMaxOffset = 6.0f;  // log2 domain
constexpr u32 kMaxProbabilityFp16 = 0x7400;  // as fp16

// Replaces a score scale of 0: a masked score is infinite, and 0 * infinity is NaN.
constexpr float kTinyScale = 0x1p-126f;
