// Scales: a number from the host, or a one-element tensor on the device.

#pragma once

__device__ inline float value_of(const float* tensor, float value) {
  return tensor == nullptr ? value : *tensor;
}
