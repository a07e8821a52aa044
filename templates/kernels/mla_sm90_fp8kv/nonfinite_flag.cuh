// Flag for NaN/Inf in V.

#pragma once

#include "softmax/nonfinite_flag.cuh"
