// Where a block goes: one of the two stages, and the barriers that say when. Needs SharedMemory,
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
    if constexpr (kStep < kLatentSteps / 2) {
      wait_for(shared.left_empty[stage], parity);
    } else if constexpr (kStep < kRopeStep) {
      wait_for(shared.right_empty[stage], parity);
    } else {
      wait_for(shared.rope_empty[stage], parity);
    }
  }

  // Says that this warp's part of them is written.
  template <int kStep>
  __device__ void tell() const {
    fence_proxy_async();
    __syncwarp();
    constexpr int kStepTiles = kStep == kRopeStep ? 1 : 2;
    const int lane = lane_index();
    if (lane < kStepTiles) arrive_at(shared.tile_full[stage][kStep * 2 + lane]);
  }
};

// Where the blocks of all items go, in turn. Items begin with the first stage.
struct BlockRooms {
  SharedMemory& shared;
  u32 parity = 1;

  __device__ explicit BlockRooms(SharedMemory& shared) : shared(shared) {}

  template <int kStage>
  __device__ BlockRoom room() const {
    return {shared, kStage, parity};
  }

  // A block that does not exist, for items are taken in pairs of blocks, arrives with nothing in
  // it.
  template <int kStage>
  __device__ void skip() {
    const BlockRoom here = room<kStage>();
    here.wait<0>();
    here.tell<0>();
    here.tell<1>();
    here.wait<2>();
    here.tell<2>();
    here.tell<3>();
    here.wait<4>();
    here.tell<4>();
    advance<kStage>();
  }

  template <int kStage>
  __device__ void advance() {
    if constexpr (kStage == kStages - 1) parity ^= 1;
  }
};

// The query is loaded before any block of an item: it is free first.
constexpr int kBlocksBeforeQuery = 0;
