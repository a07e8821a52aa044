// Softmax state of the rows of a thread: the warps that have the softmax publish it.

#pragma once

#include "softmax/rows_in_smem.cuh"
