// Stores of partial softmax states.

#pragma once

#include "combine/store_partial_state_smem.cuh"
