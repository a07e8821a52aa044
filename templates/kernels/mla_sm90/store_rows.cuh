// Epilogue stores: rows of O and their LSE, and the partial softmax states of a split.

#pragma once

#include "row_results.cuh"
#include "store_out.cuh"
