// Stores of partial softmax states.

#include "combine/store_partial_state_smem.cuh"
