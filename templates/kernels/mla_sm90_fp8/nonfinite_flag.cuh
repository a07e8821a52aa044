// Whether V has elements that are not finite.

#include "softmax/nonfinite_flag.cuh"
