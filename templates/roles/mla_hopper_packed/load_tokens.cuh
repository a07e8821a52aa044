// The producers bring the tokens of every item into the stages, converted. Needs
// block_rows.cuh, room_wide.cuh or room_narrow.cuh, blocks/decode_e4m3.cuh, blocks/swizzle.cuh,
// ptx/ld.cuh.

using StepChunks = Chunk[kStepChunks];

// Lane `lane` of the warp has of a latent step the chunk `chunk` of eight of token `token(i)`:
// eight neighbouring lanes write to all banks.
struct LatentLane {
  u32 first;  // token 0
  u32 chunk;

  __device__ LatentLane() {
    const u32 thread = threadIdx.x;
    first = thread / 16 % 2 * 2 + thread / 4 % 2;
    chunk = thread % 4 + thread / 8 % 2 * 4;
  }

  __device__ u32 token(u32 i) const { return first + i * 4; }
};

// Of a rope part of 16 bits, and of one of eight.
struct RopeLane {
  static constexpr int kChunks = kIsPacked ? kRopeDim * 2 / kChunkBytes : kRopeDim / kChunkBytes;
  static constexpr int kTokens = kWarpLanes / kChunks;  // at a time
  u32 first;
  u32 chunk;

  __device__ RopeLane() {
    const u32 thread = threadIdx.x;
    first = thread % kWarpLanes / kChunks;
    chunk = thread % kChunks;
  }

  __device__ u32 token(u32 i) const { return first + i * kTokens; }
};
constexpr int kRopeChunks = kWarpTokens / RopeLane::kTokens;  // of a thread

// Pointers of other lanes' tokens.
__device__ inline const unsigned char* row_of_lane(const unsigned char* own, int lane) {
  return reinterpret_cast<const unsigned char*>(__shfl_sync(~0u, reinterpret_cast<u64>(own), lane));
}

__device__ inline Chunk read_chunk(const unsigned char* row, int offset) {
  const uint4 words = ld_global_v4_u32(row + offset);
  return {{words.x, words.y, words.z, words.w}};
}

// Which of its team this block is; worked out where it is used, not kept.
__device__ inline int own_member(const Params& params) {
  const int block = static_cast<int>(blockIdx.x);
  return block - in_teams(params, block) * params.team_size;
}

// Streams the blocks of an item: while a step is converted, the next one is on its way.
struct BlockStream {
  const Params& params;
  const Part& part;  // in shared memory
  int next_id;  // of the block after the one that is loaded
  TokenRow row;  // of the block that is loaded
  float scales[kLaneScales];  // of the block that is converted
  u32 missing;
  StepChunks chunks[2];  // of a step and of the next

  __device__ BlockStream(const Params& params, const Part& part)
      : params(params),
        part(part),
        row(params, TokenIds(params, part).read(part.first_block), part.first_block) {
    next_id = TokenIds(params, part).read(part.first_block + 1);
    load<0, 0>();
  }

  template <int kStep, int kBuffer>
  __device__ void load() {
    if constexpr (kStep < kRopeStep) {
      const LatentLane lane;
#pragma unroll
      for (int i = 0; i < kStepChunks; ++i) {
        const unsigned char* of = row_of_lane(row.latent, lane.token(i));
        chunks[kBuffer][i] = read_chunk(of, lane.chunk * kChunkBytes + kStep * kScaledDims);
      }
    } else {
      const RopeLane lane;
#pragma unroll
      for (int i = 0; i < kRopeChunks; ++i) {
        const unsigned char* of = kIsPacked ? row.latent + kRopeOffset : row.rope;
        chunks[kBuffer][i] = read_chunk(row_of_lane(of, lane.token(i)), lane.chunk * kChunkBytes);
      }
    }
  }

  // Writes a step's tiles. Where chunks lie that a lane has of other tokens, and the second chunk
  // that eight bits become, differs in bits that the swizzle leaves apart.
  template <int kStep, int kBuffer>
  __device__ void convert(unsigned char* tiles) const {
    constexpr int kTokensBytes = kWarpTokens * kTileRowBytes;  // of one warp
    tiles += kStep * 2 * kTileBytes + threadIdx.x / kWarpLanes % kLoadingWarps * kTokensBytes;
    if constexpr (kStep < kRopeStep) {
      const LatentLane lane;
      const u32 offset = lane.chunk / 4 * kTileBytes +
                         swizzled_offset<kTileRowBytes>(lane.first, lane.chunk % 4 * 2);
#pragma unroll
      for (int i = 0; i < kStepChunks; ++i) {
        const float scale = __shfl_sync(~0u, scales[kStep % kLaneScales],
                                        lane.token(i) + kStep / kLaneScales * kWarpTokens);
        Chunk decoded[2];
        decode_e4m3(Element{}, chunks[kBuffer][i], scale, decoded);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 place = (offset ^ (i % 2 * 4 + half) * kChunkBytes) + i * 4 * kTileRowBytes;
          *reinterpret_cast<Chunk*>(tiles + place) = decoded[half];
        }
      }
    } else if constexpr (kIsPacked) {
      const RopeLane lane;
      const u32 offset = swizzled_offset<kTileRowBytes>(lane.first, lane.chunk);
#pragma unroll
      for (int i = 0; i < kRopeChunks; ++i) {
        const Chunk& stored = chunks[kBuffer][i];
        const Chunk decoded =
            kIsSame<Element, Bf16> ? stored : decode_bf16(Element{}, stored, 1.0f);
        const u32 place = (offset ^ i % 2 * 4 * kChunkBytes) + i * 4 * kTileRowBytes;
        *reinterpret_cast<Chunk*>(tiles + place) = decoded;
      }
    } else {
      const RopeLane lane;
      const u32 offset = swizzled_offset<kTileRowBytes>(lane.first, lane.chunk * 2);
#pragma unroll
      for (int i = 0; i < kRopeChunks; ++i) {
        Chunk decoded[2];
        decode_e4m3(Element{}, chunks[kBuffer][i], params.rope_scale, decoded);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 place = (offset ^ half * kChunkBytes) + i * 8 * kTileRowBytes;
          *reinterpret_cast<Chunk*>(tiles + place) = decoded[half];
        }
      }
    }
  }

  // Has the next block brought into L2: by one of the team's blocks, which read the same tokens at
  // about the same time.
  __device__ void prefetch(int block) const {
    if (params.team_size == 1 || own_member(params) == (block & 1)) {
      prefetch_rows(params, next_id, block);
    }
  }

  // Blocks alternate between two stages: with an odd number of steps, so do the buffers.
  template <int kStage, int kStep>
  __device__ void take_step(const BlockRoom& room, int block) {
    constexpr int kBuffer = (kStage * kSteps + kStep) % 2;
    if constexpr (kStep == kRopeStep) {
      row = TokenRow(params, next_id, block + 1);
      next_id = TokenIds(params, part).read(block + 2);
    }
    load<(kStep + 1) % kSteps, 1 - kBuffer>();
    room.wait<kStep>();
    if (kIsSparse && kStep == kRopeStep && lane_index() == 0) {
      room.unlisted().set(threadIdx.x / kWarpLanes % kLoadingWarps, missing);
    }
    convert<kStep, kBuffer>(room.tiles());
    room.tell<kStep>();
  }

  template <int kStage>
  __device__ void take_block(const BlockRoom& room, int block) {
    missing = row.missing;
#pragma unroll
    for (int i = 0; i < kLaneScales; ++i) scales[i] = row.scales[i];
    take_step<kStage, 0>(room, block);
    prefetch(block + 1);
    take_step<kStage, 1>(room, block);
    take_step<kStage, 2>(room, block);
    take_step<kStage, 3>(room, block);
    take_step<kStage, 4>(room, block);
  }
};
static_assert(kSteps == 5 && kRopeStep == 4, "the steps of a block are written out");
