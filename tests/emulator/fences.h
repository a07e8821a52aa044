// Which writes of shared memory wgmma may read: those that a proxy fence has ordered before. Plain
// stores are not followed.

// The last write of 16 bytes. The fence may be in the thread that writes, or in the one that reads.
struct ChunkWrite {
  unsigned when;  // 0 for none
  int thread;
};
inline std::vector<ChunkWrite> chunk_writes;  // of the block that runs
inline std::vector<unsigned> fences;  // when each thread passed its last one
inline unsigned now;

static void note_write(u32 address) { chunk_writes[address / 16] = {++now, current}; }
static void fence_proxy_async() { fences[current] = ++now; }
// For readers that had all passed one at `fenced`.
static void require_fence(u32 address, unsigned fenced) {
  const ChunkWrite& write = chunk_writes[address / 16];
  if (write.when > fences[write.thread] && write.when > fenced)
    complain("no fence before wgmma reads", address);
}
