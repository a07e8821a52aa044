// When the reference of a row moves, in the online softmax of the portable families.

#pragma once

// A row's probabilities are relative to its reference, which is kept until a score exceeds it by
// this much in log2 units. So warps need not agree on a maximum for every tile, the output is
// rescaled seldom, and no probability exceeds 2^8, which fp16 holds.
constexpr float kRescaleThreshold = 8.0f;
