// Values that some row of a tile must not see: 0 * NaN is NaN, so what is not finite must not meet
// the tensor cores, though its weight is 0. Needs SharedMemory, Item, values.cuh,
// roles/mla_hopper/finite_elements.cuh.

// A pair of stored elements with zeros for those that become not finite by their scale.
__device__ inline u32 finite_when_decoded(u32 pair, float scale) {
  const u32 decoded = decode_pair(pair, scale, scale);
  return (is_finite(decoded) ? pair & 0xff : 0) | (is_finite(decoded >> 16) ? pair & 0xff00 : 0);
}

// Puts zeros for what is not finite in the tokens from `first` to `end` of the block at `stage`, by
// the consumers; and for a scale that is not. Some row sees these tokens.
__device__ inline void clear_nonfinite(SharedMemory& shared, const Item& item, unsigned char* stage,
                                       int first, int end) {
  constexpr int kTokenPairs = kLatentDim / 2;
#pragma unroll 1
  for (int i = fresh_thread(); i < (end - first) * kTokenPairs; i += kConsumerThreads) {
    const int token = first + i / kTokenPairs;
    const int dim = i % kTokenPairs * 2;
    float& scale = scale_by_group(stage, token, dim / kScaledDims);
    const u32 row = dim / kTileRowBytes * kTileBytes +
                    swizzled_offset<128>(token, dim % kTileRowBytes / kChunkBytes);
    u16& stored = *reinterpret_cast<u16*>(stage + row + dim % kChunkBytes);
    const bool is_scaled = fabsf(scale) <= kLargest;
    const u32 finite = finite_when_decoded(stored, scale);
    if (is_scaled && finite == stored) continue;
    stored = static_cast<u16>(finite);
    if (!is_scaled) scale = 0.0f;
    nonfinite_flag(shared, item) = 1;
  }
  barrier_sync(kConsumerBarrier, kConsumerThreads);
}
