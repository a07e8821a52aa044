// Two-way combine in registers.

#pragma once

#include "combine/accumulate_partial_smem.cuh"
