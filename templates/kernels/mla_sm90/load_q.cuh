// Q loads.

#pragma once

#include "pipeline/load_q_16bit.cuh"
