// Whether V has elements that are not finite.

#pragma once

#include "softmax/nonfinite_flag.cuh"
