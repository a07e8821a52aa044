// The scales of a block's tokens in shared memory. Needs SharedMemory.

// They come token by token; then each warp of the scorer leaves those of its sixteen tokens group
// by group, so that two tokens' lie beside each other.
__device__ constexpr int scale_place(int token, int group) {
  return token / kTokensOfWarp * (kTokensOfWarp * kScaleGroups) + group * kTokensOfWarp +
         token % kTokensOfWarp;
}

__device__ inline float& scale_by_group(unsigned char* stage, int token, int group) {
  return reinterpret_cast<float*>(stage + kScalesOffset)[scale_place(token, group)];
}

// Of tokens g and g + 8 of a warp, with g = lane / 4.
struct KeyScales {
  float of[2][kScaleGroups];

  // Reads them, and puts them in order.
  __device__ explicit KeyScales(unsigned char* stage) {
    const int lane = fresh_lane();
    const int token = fresh_warp() % kScorerWarps * kTokensOfWarp + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 found = reinterpret_cast<const float4*>(stage + kScalesOffset)[token + half * 8];
      of[half][0] = found.x;
      of[half][1] = found.y;
      of[half][2] = found.z;
      of[half][3] = found.w;
    }
    __syncwarp();  // all lanes have read them
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float low = lane % 2 == 0 ? of[half][0] : of[half][1];
      const float high = lane % 2 == 0 ? of[half][2] : of[half][3];
      scale_by_group(stage, token + half * 8, lane % 4) = lane % 4 < 2 ? low : high;
    }
  }
};
static_assert(kScaleGroups == 4, "a lane leaves one scale of a token");
static_assert(kTokensOfWarp == 16, "a warp scores a matrix of tokens");
