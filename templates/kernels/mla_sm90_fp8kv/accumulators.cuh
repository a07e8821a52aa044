// Accumulators of O^T.

#pragma once

#include "common/accumulators_swap_ab.cuh"
