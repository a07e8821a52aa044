// Values as the left operand of O^T += V^T P^T: out of shared memory into registers, across. Needs
// SharedMemory, Item, dims.cuh, finite_values.cuh, ptx/ldmatrix.cuh.

constexpr int kSteps = kBlockTokens / kStepElements;  // of a block
using Values = u32[kSteps][4];

// Four matrices of eight tokens each and 16 dims; a lane gets dims 2g and 2g + 1 of tokens 2c and
// 2c + 1 of each. Permuted by bytes, a word holds four tokens of one dim, of 16 in the order 2c,
// 2c + 8, 2c + 1, 2c + 9, as P does.
struct ValueRows {
  u32 address;  // of this lane's row, of the warp's dims of tile 0

  // Of the block at `stage`.
  __device__ explicit ValueRows(u32 stage) {
    const int lane = fresh_lane();
    const int warp = fresh_warp();
    address = stage + warp / 4 * (kHalfDims / kTileRowBytes) * kTileBytes +
              swizzled_offset<kTileRowBytes>(lane, warp % 4);
  }

  // Of tile `tile` of dims: half a row, four chunks, and so one bit of the swizzled address.
  __device__ void load(Values& values, int tile) const {
    const u32 row = (address ^ (tile % 2 * 64)) + tile / 2 * kTileBytes;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      u32 found[4];
      ldmatrix_x4_trans(found, row + k * kStepElements * kTileRowBytes);
      values[k][0] = __byte_perm(found[0], found[1], 0x6240);
      values[k][1] = __byte_perm(found[0], found[1], 0x7351);
      values[k][2] = __byte_perm(found[2], found[3], 0x6240);
      values[k][3] = __byte_perm(found[2], found[3], 0x7351);
    }
  }
};

// Puts zeros for NaN in the tokens of the block from `first` on; says whether one of those before
// `visible` had any, so that a row sees it.
__device__ inline bool clear_nan(Values& values, int first, int visible) {
  bool sees = false;
  const int lane_token = fresh_lane() % 4 * 2;
  first -= lane_token;
  visible -= lane_token;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 hidden = 0;  // bytes of tokens from `first` on
      u32 seen = 0;  // of those before `visible`
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        const int token = k * kStepElements + half * 16 + byte / 2 + byte % 2 * 8;
        if (token >= first) hidden |= 0xffu << byte * 8;
        if (token < visible) seen |= 0xffu << byte * 8;
      }
#pragma unroll
      for (int dim = 0; dim < 2; ++dim) {
        u32& word = values[k][half * 2 + dim];
        const u32 cleared = nan_bytes(word) & hidden;
        sees |= (cleared & seen) != 0;
        word &= ~cleared;
      }
    }
  }
  return sees;
}
