// Sequence lengths.

#pragma once

#include "scheduler/seq_info_paged.cuh"
