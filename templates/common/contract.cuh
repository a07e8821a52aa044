// Contract of the shared templates with an sm90 MLA kernel: what the files of its folder define for
// them. What only some kernels define is stated where it is used: TMA boxes, gathers, swap-AB, rows
// in shared memory.

#pragma once

#include "accumulators.cuh"
#include "combine/partial.cuh"
#include "common/barriers.cuh"
#include "common/mla_sm90_config.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_token.cuh"
#include "scheduler/contract.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "seq_info.cuh"
#include "shared_memory.cuh"
#include "store_rows.cuh"
#include "thread_rows.cuh"

// config.cuh: Element, of the output; the threads of a CTA, PV warps first; arrivals; Q; barriers.
static_assert(kIsSame<Element, Bf16> || kIsSame<Element, Fp16>, "O is stored in 16 bits");
static_assert(kProducerThreads % 128 == 0 && kPvThreads + kProducerThreads <= kThreads,
              "the producer warpgroup follows the PV warps: producer warps, then scheduler warps");
static_assert(kWorkReaders >= kProducerWarps + kPvWarps,
              "each warp that reads a work item arrives to release its slot");
static_assert(kQueryReaders > 0, "each warpgroup that reads Q arrives to release it");
static_assert(kLatentTiles * kQueryTileBytes <= sizeof(SharedMemoryPlan::query),
              "Q begins with its latent tiles, and the rope tile follows");
static_assert(kQueryRopeBytes <= kQueryRopeRowBytes, "a row of the rope tile holds its rope part");

// shared_memory.cuh: the plan, its pipelines, and what the split reduction may alias.
static_assert(kIsSame<decltype(SharedMemoryPlan::scheduler_storage), SchedulerStorage>,
              "range of the CTA, its first work item, and the current one");
static_assert(kIsSame<decltype(SharedMemoryPlan::work_items), WorkItem[2]>,
              "slots of the work pipeline: the work item in use, and the next one");
static_assert(kIsSame<decltype(SharedMemoryPlan::work_full), Barrier[2]> &&
                  kIsSame<decltype(SharedMemoryPlan::work_empty), Barrier[2]>,
              "a slot has a work item; all its readers are done with it");
static_assert(kIsSame<decltype(SharedMemoryPlan::first_query_full), Barrier>,
              "the PV warps have loaded Q of the first work item");
static_assert(kIsSame<decltype(SharedMemoryPlan::query_full), Barrier> &&
                  kIsSame<decltype(SharedMemoryPlan::query_empty), Barrier>,
              "Q of a later work item is loaded; all QK GEMMs of the one before are complete");
static_assert(kStages >= 2, "stages of the KV pipeline");
static_assert(kCombineSmemBytes >= sizeof(SharedMemoryPlan::query) + sizeof(SharedMemoryPlan::kv),
              "bytes from `query` on that are dead after the last work item");
static_assert(kIsSame<decltype(nonfinite_flag), int&(SharedMemoryPlan&, const WorkItem&)>,
              "whether a row of the work item attends to a cleared element of V");

// seq_info.cuh, beside scheduler/contract.cuh.
static_assert(kIsSame<decltype(SeqInfo::rows), int>, "query rows: those of its M tiles");
static_assert(kIsSame<decltype(seq_len_of), int(const Params&, int)>, "its unchecked KV length");

// kv_token.cuh: a stored token, whose page exists.
static_assert(kIsSame<decltype(stored_token), StoredToken(const Params&, int, int)> &&
                  kIsSame<decltype(&StoredToken::value), float (StoredToken::*)(int) const>,
              "a dequantized element of V");

// accumulators.cuh: rows, dims and fragments of a thread's part of O.
static_assert(sizeof(Accumulators) == kAccumulators * sizeof(float4), "float4s of a thread");
static_assert(kRowsPerThread % 2 == 0 && kAccumulators % (kRowsPerThread / 2) == 0,
              "a float4 has two rows, and every pair of rows as many float4s");
static_assert(kNumFrags % kFragsPerRowGroup == 0 && kBlockM % kRowsPerGroup == 0,
              "fragments of the same rows are consecutive, in the order of their dims");
static_assert(kIsSame<decltype(accumulator), float4(const Accumulators&, int)> &&
                  kIsSame<decltype(set_accumulator), void(Accumulators&, int, float4)>,
              "float4 `i` of a thread");
static_assert(kIsSame<decltype(element_row), int(int, int, int)> &&
                  kIsSame<decltype(element_dim), int(int, int, int)>,
              "row and dim of a component of float4 `i` of a warp");
static_assert(kIsSame<decltype(frag_rows), FragRows(u32)>, "the two rows of a fragment");

// thread_rows.cuh and store_rows.cuh: softmax states of a thread's rows; stores of rows.
static_assert(kNumScales == 1 || kNumScales == 2, "fp16 scales of a row of partial O");
static_assert(
    kIsSame<decltype(compute_fp16_scales), void(SharedMemoryPlan&, const Accumulators&,
                                                const ThreadRows&, float (&)[kRowsPerThread])> &&
        kIsSame<decltype(store_partial_states),
                void(PartialState*, const ThreadRows&, const float (&)[kRowsPerThread])>,
    "a split: fp16 scales of its rows, and their states");
static_assert(kIsSame<decltype(store_rows), void(const Params&, const WorkItem&, SharedMemoryPlan&,
                                                 const Accumulators&, const ThreadRows&)>,
              "final rows of O");
