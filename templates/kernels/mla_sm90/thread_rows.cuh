// Softmax state of the rows of a thread, in registers.

#pragma once

#include "accumulators.cuh"
#include "softmax/row_state.cuh"

using ThreadRows = RowState[kRowsPerThread];
