// Flag for NaN in V.

#pragma once

#include "softmax/nonfinite_flag.cuh"
