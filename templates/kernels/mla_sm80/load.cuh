// Loads of Q, and of KV blocks of the paged or sparse cache by cp.async.

#pragma once

#include "common/block_table.cuh"
#include "common/fp8.cuh"
#include "common/packed_row.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/pools.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "work_item.cuh"

// Latent and rope part may be separate tensors; strides in bytes.
__device__ inline const unsigned char* latent_q(const Params& params, i64 query, int head) {
  return params.query + query * params.query_stride + head * params.query_head_stride;
}

__device__ inline const unsigned char* rope_q(const Params& params, i64 query, int head) {
  return params.query_rope + query * params.query_rope_stride +
         head * params.query_rope_head_stride;
}

__device__ inline Chunk* query_chunk(SharedMemoryPlan& smem, int row, int chunk) {
  return reinterpret_cast<Chunk*>(smem.query + swizzled_offset<kTokenBytes>(row, chunk));
}

// A row that needs no conversion.
__device__ inline void copy_query_row(const Params& params, i64 query, int head, int row, int lane,
                                      SharedMemoryPlan& smem) {
  const unsigned char* latent = latent_q(params, query, head);
  const unsigned char* rope = rope_q(params, query, head);
  constexpr int kLatentChunks = kLatentDim / kChunkElements;
#pragma unroll
  for (int chunk = 0; chunk < kHeadDimQk / kChunkElements; chunk += 8) {
    const unsigned char* source = chunk < kLatentChunks
                                      ? latent + (chunk + lane) * kChunkBytes
                                      : rope + (chunk - kLatentChunks + lane) * kChunkBytes;
    cp_async_cg_16(shared_address(query_chunk(smem, row, chunk + lane)), source, kChunkBytes);
  }
}

// The scale of a packed query token applies to both parts.
__device__ inline void dequant_query_row(const Params& params, i64 query, int head, int row,
                                         int lane, SharedMemoryPlan& smem) {
  const Chunk* latent = reinterpret_cast<const Chunk*>(latent_q(params, query, head));
  const Chunk* rope = reinterpret_cast<const Chunk*>(rope_q(params, query, head));
  const float scale = params.query_scales == nullptr ? 1.0f : params.query_scales[query];
  constexpr int kLatentChunks = kLatentDim / 16;
  for (int chunk = lane; chunk < (kHasPackedQuery ? kLatentDim : kHeadDimQk) / 16; chunk += 8) {
    Chunk dequantized[2];
    const Chunk stored = chunk < kLatentChunks ? latent[chunk] : rope[chunk - kLatentChunks];
    if constexpr (kHasPackedQuery) {
      dequant_e4m3(Element{}, stored, scale, dequantized);
    } else {
      dequant_e4m3(Element{}, stored, dequantized);
    }
    *query_chunk(smem, row, chunk * 2) = dequantized[0];
    *query_chunk(smem, row, chunk * 2 + 1) = dequantized[1];
  }
  if constexpr (kHasPackedQuery) {
    *query_chunk(smem, row, kLatentDim / kChunkElements + lane) =
        scale_bf16(Element{}, rope[lane], scale);
  }
}

// Loads the CTA's query rows into shared memory. Eight lanes load one row.
__device__ inline void load_q(const Params& params, const WorkItem& work, SharedMemoryPlan& smem) {
  const int lane = lane_index() % 8;
  for (int row = static_cast<int>(threadIdx.x) / 8; row < kBlockM; row += kThreads / 8) {
    if (row < work.rows) {
      const i64 query = work.first_query + work.token_of(row);
      if constexpr (kDequantsQuery) {
        dequant_query_row(params, query, work.head_of(row), row, lane, smem);
      } else {
        copy_query_row(params, query, work.head_of(row), row, lane, smem);
      }
    } else {
      for (int chunk = lane; chunk < kTokenBytes / kChunkBytes; chunk += 8) {
        *query_chunk(smem, row, chunk) = Chunk{};
      }
    }
  }
}

// Copies data row and scale row of a token, one behind the other, eight lanes together.
template <typename Row>
__device__ inline void copy_pooled_row(u32 target, const PooledToken& token) {
  constexpr int kBytes = Row::kDataBytes + Row::kScaleRowBytes;
  const u32 chunk_bytes = token.exists ? kChunkBytes : 0;
#pragma unroll
  for (int column = 0; column < kBytes; column += 128) {
    const int offset = column + lane_index() % 8 * kChunkBytes;
    if (offset < Row::kDataBytes) {
      cp_async_cg_16(target + offset, token.data + offset, chunk_bytes);
    } else if (offset < kBytes) {
      const unsigned char* source = token.scales + (offset - Row::kDataBytes);
      if constexpr (Row::kScaleRowBytes == 8) {
        cp_async_ca_8(target + offset, source, token.exists ? 8 : 0);
      } else {
        cp_async_cg_16(target + offset, source, chunk_bytes);
      }
    }
  }
}

// Bytes of a stored token before its rope part, if that part may be a separate tensor.
constexpr bool kHasBf16Rope = kHasPackedRows && kRopeDim > 0;
constexpr int kStoredRopeBytes = kHasPackedRows ? 0 : kStoredBytes / kHeadDimQk * kRopeDim;
constexpr int kStoredLatentBytes = kStoredBytes - kStoredRopeBytes;

// Scales of a token outside its row; the stage holds them behind it.
constexpr int kOuterScales = KvRow::kScaleBytes == 0 ? kScales : 0;

// Reads page ids, or top-k indices, one stage ahead, so that no copy waits for them.
struct KvLoader {
  const Params& params;
  const int* key_ids;  // page ids, or top-k indices, of the sequence
  const int* value_ids;
  PooledIndices pooled;  // instead, of two pools
  int end_token;  // tokens from here on are not loaded; their slots are zero-filled
  int end_stage;
  int next_stage;
  int next_ids[kRounds];

  __device__ KvLoader(const Params& params, const WorkItem& work)
      : params(params),
        end_token(work.kv_end),
        end_stage(work.end_kv_block * kStagesPerBlock),
        next_stage(work.first_kv_block * kStagesPerBlock) {
    const i64 start = block_table_row(params, work.seq_idx).start;
    key_ids = params.block_tables + start;
    value_ids = kHasSeparateValues ? params.value_tables + start : nullptr;
    if constexpr (kHasTwoPools) pooled = pooled_indices(params, work.seq_idx);
    read_ids();
  }

  // Token of the KV block that this thread copies in a round
  __device__ static int block_token(int round) {
    return round * kRoundTokens + static_cast<int>(threadIdx.x) / 8;
  }

  __device__ bool holds_values() const { return kHasSeparateValues && next_stage % 2 == 1; }
  __device__ int next_kv_block() const { return next_stage / kStagesPerBlock; }

  __device__ void read_ids() {
    const int* ids = holds_values() ? value_ids : key_ids;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int token = next_kv_block() * kBlockN + block_token(round);
      if constexpr (kHasTwoPools) {
        next_ids[round] = token < end_token ? pooled.read(token) : -1;
      } else {
        next_ids[round] = token < end_token ? ids[kIsSparse ? token : token / kPageSize] : -1;
      }
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
    if constexpr (kHasTwoPools) {
      copy_pooled_token(params, smem, round);
    } else {
      copy_paged_token(smem, round);
    }
  }

  // A template: without two pools, Params lacks these parameters.
  template <typename PoolParams>
  __device__ void copy_pooled_token(const PoolParams& params, SharedMemoryPlan& smem,
                                    int round) const {
    const int block_idx = block_token(round);
    const bool is_extra = pooled.is_extra(next_kv_block() * kBlockN + block_idx);
    const PooledToken token = pooled_token(params, next_ids[round], is_extra);
    const u32 target = shared_address(stage_ptr(smem, next_stage)) + block_idx * kStageRowBytes;
    if (!kIsSame<KvRow, ExtraKvRow> && is_extra) {
      copy_pooled_row<ExtraKvRow>(target, token);
    } else {
      copy_pooled_row<KvRow>(target, token);
    }
  }

  // By page id, or by top-k index into pages of a known size.
  __device__ void copy_paged_token(SharedMemoryPlan& smem, int round) const {
    const int token = block_token(round);
    const int id = next_ids[round];
    const int page = kIsSparse && id >= 0 ? id / kPageSize : id;
    const int slot = (kIsSparse ? id : next_kv_block() * kBlockN + token) % kPageSize;
    const bool exists = is_valid_page(page, params.num_pages);
    const unsigned char* base = holds_values() ? params.value_cache : params.cache;
    const PagedRows latent{base, params.page_stride, params.token_stride};
    const int lane = lane_index() % 8;
    const u32 target = shared_address(stage_ptr(smem, next_stage)) +
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
