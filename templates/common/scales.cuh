// A scale is a number, or a tensor of one element that only the device knows.

#pragma once

__device__ inline float value_of(const float* tensor, float value) {
  return tensor == nullptr ? value : *tensor;
}
