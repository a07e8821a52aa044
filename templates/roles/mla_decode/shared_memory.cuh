// The shared memory of a block, whole. Needs roles/mla_decode/constants.
struct alignas(16) SharedMemory {
  unsigned char query[kRows * kTokenBytes];  // [kRows][kHeadDimQk], swizzled; then the output
  unsigned char kv[kStages][kTileTokens * kTokenBytes];  // [kTileTokens][kHeadDimQk], swizzled
  unsigned char probabilities[kRows * kProbabilityBytes];  // [kRows][kTileTokens], swizzled
  int row_visible[kRows];  // how many tokens a row sees
  float row_partial[kTokenWarps][kRows];  // what each token warp found for a row: maximum, or sum
  float row_reference[kRows];  // what the probabilities are relative to, log2 units
  float row_rescale[kRows];  // what the output so far must be multiplied by
};
static_assert(sizeof(SharedMemory) == kSharedBytes, "the spec computes what the struct takes");
