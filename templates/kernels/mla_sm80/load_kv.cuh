// KV loads by cp.async: streams tiles of the paged or sparse cache into the pipeline stages.

#pragma once

#include "common/block_table.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "shared_memory.cuh"
#include "work_tile.cuh"

// Bytes of a stored token before its rope part, if that part may be a separate tensor.
constexpr bool kHasBf16Rope = kIsSame<StoredToken, Fp8DsMla> || kIsSame<StoredToken, Fp8PerToken>;
constexpr int kStoredRopeBytes = kHasBf16Rope ? 0 : kStoredBytes / kHeadDimQk * kRopeDim;
constexpr int kStoredLatentBytes = kStoredBytes - kStoredRopeBytes;

// Scales of a token outside its row; the stage holds them behind it.
constexpr int kOuterScales = kStageRowBytes == kStoredBytes      ? 0
                             : kIsSame<StoredToken, Fp8PerToken> ? 1
                                                                 : 4;

// Reads page ids, or top-k indices, one stage ahead, so that no copy waits for them.
struct KvLoader {
  const Params& params;
  const int* key_ids;  // page ids, or top-k indices, of the sequence
  const int* value_ids;
  int end_token;  // tokens from here on are not loaded; their slots are zero-filled
  int end_stage;
  int next_stage;
  int next_ids[kRounds];

  __device__ KvLoader(const Params& params, const Work& work)
      : params(params),
        end_token(work.kv_end),
        end_stage(work.end_kv_block * kStagesPerBlock),
        next_stage(work.first_kv_block * kStagesPerBlock) {
    const i64 start = block_table_row(params, work.seq_idx).start;
    key_ids = params.block_tables + start;
    value_ids = kHasSeparateValues ? params.value_tables + start : nullptr;
    read_ids();
  }

  // Token of the tile that this thread copies in a round
  __device__ static int tile_token(int round) {
    return round * kRoundTokens + static_cast<int>(threadIdx.x) / 8;
  }

  __device__ bool holds_values() const { return kHasSeparateValues && next_stage % 2 == 1; }
  __device__ int next_kv_block() const { return next_stage / kStagesPerBlock; }

  __device__ void read_ids() {
    const int* ids = holds_values() ? value_ids : key_ids;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int token = next_kv_block() * kBlockN + tile_token(round);
      next_ids[round] = token < end_token ? ids[kIsSparse ? token : token / kPageSize] : -1;
    }
  }

  // Copies a part of a row, eight lanes together. A null `source` zero-fills.
  template <int kBytes>
  __device__ static void copy_part(u32 target, const unsigned char* source,
                                   const unsigned char* anywhere) {
    const int lane = lane_index() % 8;
#pragma unroll
    for (int column = 0; column < kBytes; column += 128) {
      const int offset = column + lane * kChunkBytes;
      if (kBytes % 128 != 0 && offset >= kBytes) continue;
      // The swizzle permutes chunks within 128 bytes; the caller has applied it to the first.
      const u32 at = target + (kDequantsKv ? offset : column);
      cp_async_cg_16(at, source == nullptr ? anywhere : source + offset,
                     source == nullptr ? 0 : kChunkBytes);
    }
  }

  __device__ void copy_round(SharedMemoryPlan& smem, int round) const {
    const int token = tile_token(round);
    const int id = next_ids[round];
    const int page = kIsSparse && id >= 0 ? id / kPageSize : id;
    const int slot = (kIsSparse ? id : next_kv_block() * kBlockN + token) % kPageSize;
    const bool exists = is_valid_page(page, params.num_pages);
    const unsigned char* base = holds_values() ? params.value_cache : params.cache;
    const PagedRows latent{base, params.page_stride, params.token_stride};
    const int lane = lane_index() % 8;
    const u32 target = shared_address(stage_of(smem, next_stage)) +
                       (kDequantsKv ? static_cast<u32>(token * kStageRowBytes)
                                    : swizzled_offset<kTokenBytes>(token, lane));
    copy_part<kStoredLatentBytes>(target, exists ? latent.row_of(page, slot) : nullptr, base);
    if constexpr (kStoredRopeBytes > 0) {
      if (!holds_values()) {
        const PagedRows rope{params.rope_cache, params.rope_page_stride, params.rope_token_stride};
        copy_part<kStoredRopeBytes>(target + kStoredLatentBytes,
                                    exists ? rope.row_of(page, slot) : nullptr, base);
      }
    }
    if constexpr (kOuterScales > 0) {
      if (params.kv_scales != nullptr && lane < kOuterScales) {
        const i64 scale = page * params.scale_page_stride + slot * params.scale_token_stride + lane;
        cp_async_ca_4(target + kStoredBytes + lane * 4, params.kv_scales + (exists ? scale : 0),
                      exists ? 4 : 0);
      }
    }
  }

  // Issues the load of the next stage, if there is one, except for the scratch rounds.
  __device__ void load_next(SharedMemoryPlan& smem) const {
    if (next_stage >= end_stage) return;
#pragma unroll
    for (int round = 0; round < kRounds - kScratchRounds; ++round) copy_round(smem, round);
  }

  // Issues the rest of it, and commits the cp.async group, empty or not.
  __device__ void finish_next(SharedMemoryPlan& smem) {
    if (next_stage < end_stage) {
#pragma unroll
      for (int round = kRounds - kScratchRounds; round < kRounds; ++round) {
        copy_round(smem, round);
      }
      ++next_stage;
      read_ids();
    }
    cp_async_commit_group();
  }
};
