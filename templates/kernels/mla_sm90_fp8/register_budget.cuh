// How many registers a thread of each role has, of 128 at first.

#pragma once

#include "config.cuh"

constexpr int kConsumerRegisters = kRows > 32 ? 184 : 152;
constexpr int kScorerRegisters = kRows > 32 ? 96 : 152;
constexpr int kProducerRegisters = 48;
