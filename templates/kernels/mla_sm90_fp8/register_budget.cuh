// How many registers a thread of each role has, of 128 at first.

#pragma once

#include "config.cuh"

constexpr int kConsumerRegs = kBlockM > 32 ? 184 : 152;
constexpr int kQkRegs = kBlockM > 32 ? 96 : 152;
constexpr int kProducerRegs = 48;
