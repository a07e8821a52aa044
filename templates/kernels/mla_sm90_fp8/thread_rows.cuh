// Softmax state of the rows of a thread: the QK warpgroup publishes it.

#pragma once

#include "softmax/rows_in_smem.cuh"
