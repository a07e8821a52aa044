// Accumulator fragments of O^T, and the softmax rows of a thread.

#pragma once

#include "common/accumulators_swap_ab.cuh"
#include "softmax/thread_rows_smem.cuh"
