// Register budget: registers per thread of each warpgroup role after setmaxnreg, 128 before. With
// 64 rows the two PV warpgroups get most. A larger budget of the QK warpgroup for unsplit Q makes
// the compiler hoist so much that it serialises the wgmma (C7512).

#pragma once

#include "config.cuh"

constexpr int kConsumerRegs = kBlockM > 32 ? 176 : 128;
constexpr int kQkRegs = kBlockM > 32 ? (kSplitsQ ? 104 : 96) : 128;
constexpr int kProducerRegs = 4 * 128 - 2 * kConsumerRegs - kQkRegs;
