// Online-softmax state of a thread's rows, in registers.

#pragma once

#include "common/accumulators_swap_ab.cuh"
#include "softmax/row_result.cuh"

using ThreadRows = RowState[kRowsPerThread];
