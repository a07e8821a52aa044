// Tokens of a block that no row sees, for its list names nothing there. Needs blocks/prelude.cuh.

struct alignas(8) UnlistedTokens {
  u16 bits[4];  // of sixteen tokens each

  __device__ u64 all() const { return *reinterpret_cast<const u64*>(bits); }
};
