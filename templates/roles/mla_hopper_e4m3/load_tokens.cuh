// The loader, one warp: streams the blocks of tokens of every item through the ring. Needs
// SharedMemory, token_boxes.cuh.

// What a lane copies of every block: a tile. The lanes behind the last tile copy nothing.
struct LaneTile {
  const TensorMap* map;
  int column;
  int row_bytes;
  u32 target;  // of the first stage

  __device__ LaneTile(const Params& params, const SharedMemory& shared) {
    const bool is_rope = lane_index() >= kLatentTiles;
    map = is_rope ? &params.rope_map : &params.latent_map;
    column = is_rope ? 0 : lane_index();
    row_bytes = is_rope ? kRopeRowBytes : kTileRowBytes;
    target = shared_address(shared.tokens[0]) + min(lane_index(), kLatentTiles) * kTileBytes;
  }
};

// `part` is of the first item.
__device__ inline void load_tokens(const Params& params, int member, Part part,
                                   SharedMemory& shared) {
  const LaneTile tile(params, shared);
  RingPosition<kStages> position;
  for (u32 count = 0; part.request >= 0; part = next_part(shared, count)) {
    const int end = part.first_block + part.blocks;
    PageIds ids(params, part);
    for (int block = part.first_block; block < end; ++block) {
      const int ahead = block + kPrefetchBlocks;
      const bool is_mine = params.team_size > 1 && member == block % 2;
      if (is_mine && ahead < end) prefetch_block(params, ids, ahead);
      const BlockBoxes boxes(ids, block, part.visible_to_any);
      wait_for(shared.tokens_empty[position.stage], position.parity ^ 1);
      const u32 full = shared_address(&shared.tokens_full[position.stage]);
      if (lane_index() == 0) {
        mbarrier_arrive_expect_tx(full, boxes.count * kBoxTokens * kHeadDimQk);
      }
      __syncwarp();
      if (lane_index() <= kLatentTiles) {
        boxes.copy_tile(tile.map, tile.column, tile.target + position.stage * kBlockBytes, full,
                        tile.row_bytes);
      }
      __syncwarp();
      position.advance();
    }
  }
}
