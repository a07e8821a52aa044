// Where a block goes: a half of the ring, and the barriers that say when. Needs SharedMemory,
// blocks/barriers.cuh, ptx/fence.cuh.

struct BlockRoom {
  SharedMemory& shared;
  int stage;
  u32 parity;

  __device__ unsigned char* tiles() const { return shared.tokens[stage]; }
  __device__ UnlistedTokens& unlisted() const { return shared.unlisted[stage]; }

  // Waits until the tiles of a step may be written. A step that needs no wait has one too: beyond
  // it, compilers do not begin to convert what is still on its way.
  template <int kStep>
  __device__ void wait() const {
    constexpr int kLastTile = kStep == kRopeStep ? kLatentTiles : kStep * 2 + 1;
    wait_for(shared.stage_empty[stage + kLastTile / kStageTiles], parity);
  }

  // Says that this warp's part of them is written, where that fills a stage.
  template <int kStep>
  __device__ void tell() const {
    constexpr int kThird = kStep == 1 ? 0 : kStep == 2 ? 1 : kStep == kRopeStep ? 2 : -1;
    if constexpr (kThird >= 0) {
      fence_proxy_async();
      __syncwarp();
      if (lane_index() == 0) arrive_at(shared.stage_full[stage + kThird]);
    }
  }
};

// Where the blocks of all items go, in turn.
struct BlockRooms {
  SharedMemory& shared;
  int stage = 0;
  u32 parity = 1;

  __device__ explicit BlockRooms(SharedMemory& shared) : shared(shared) {}

  template <int>
  __device__ BlockRoom room() const {
    return {shared, stage, parity};
  }

  template <int>
  __device__ void skip() const {}

  template <int>
  __device__ void advance() {
    stage += kBlockStages;
    if (stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};
static_assert(kStages == 2 * kBlockStages, "a half is a block");

// The query is free last.
constexpr int kBlocksBeforeQuery = 1;
