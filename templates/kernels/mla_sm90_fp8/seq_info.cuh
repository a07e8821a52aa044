// Sequence lengths.

#include "scheduler/seq_info_paged.cuh"
