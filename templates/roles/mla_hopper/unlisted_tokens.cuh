// Tokens of a block that no row sees, for its list names nothing there. Needs
// roles/mla_hopper/constants.

struct alignas(8) UnlistedTokens {
  unsigned char bits[8];  // of eight tokens each

  // Those of loading warp `warp`.
  __device__ void set(int warp, u32 missing) {
    constexpr int kBytes = 8 / kLoadingWarps;
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
      bits[warp * kBytes + i] = static_cast<unsigned char>(missing >> i * 8);
    }
  }

  __device__ u64 all() const { return *reinterpret_cast<const u64*>(bits); }
};
