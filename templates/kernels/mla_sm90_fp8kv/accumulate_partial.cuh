// Two-way combine in registers.

#include "combine/accumulate_partial_smem.cuh"
