// Accumulator fragments of O^T, and the softmax rows of a thread.

#pragma once

#include "common/accumulators_transposed.cuh"
#include "softmax/thread_rows_smem.cuh"
