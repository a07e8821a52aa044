// Register budget: registers per thread of each warpgroup role after setmaxnreg, 128 before.

#pragma once

#include "config.cuh"

constexpr int kConsumerRegs = kBlockM > 32 ? 184 : 152;
constexpr int kQkRegs = kBlockM > 32 ? 96 : 152;
constexpr int kProducerRegs = 48;
