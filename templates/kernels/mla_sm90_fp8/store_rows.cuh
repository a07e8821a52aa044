// Epilogue stores: the states of the rows are in shared memory.

#pragma once

#include "combine/store_partial_state_smem.cuh"
#include "common/store_rows_swap_ab.cuh"
