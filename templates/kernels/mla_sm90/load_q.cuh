// Q loads.

#include "pipeline/load_q_16bit.cuh"
