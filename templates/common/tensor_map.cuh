// What describes a tensor to the copy engine: opaque, made on the host. Needs blocks/prelude.cuh.
struct alignas(64) TensorMap {
  u64 words[16];
};
