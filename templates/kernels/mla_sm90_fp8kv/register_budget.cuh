// How many registers a thread of each role has, of 128 at first: with 64 rows, the two consumers
// most. A scorer with more than it needs for a whole query brings so much forward that its
// products are serialised (C7512).

#pragma once

#include "config.cuh"

constexpr int kConsumerRegs = kBlockM > 32 ? 176 : 128;
constexpr int kQkRegs = kBlockM > 32 ? (kSplitsQ ? 104 : 96) : 128;
constexpr int kProducerRegs = 4 * 128 - 2 * kConsumerRegs - kQkRegs;
