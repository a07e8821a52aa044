// Makes the rows that see what is not finite so, as they would be if it had been multiplied. Needs
// accumulators.cuh, roles/mla_hopper/finite_values.cuh.

__device__ inline void restore_nonfinite(const Params& params, const Item& item,
                                         Accumulators& accumulators) {
  add_nonfinite(params, item, [&](const unsigned char* token, int position) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      const u32 pair = *reinterpret_cast<const u32*>(token + dim_of(warp_index(), i) * 2);
#pragma unroll
      for (int r = 0; r < kOwnRows; ++r) {
        if (position >= item.row_visible[own_row(r)]) continue;
        if (!is_finite(pair)) {
          accumulators[i * 4 + r * 2] += cvt_f32(Element{}, static_cast<u16>(pair));
        }
        if (!is_finite(pair >> 16)) {
          accumulators[i * 4 + r * 2 + 1] += cvt_f32(Element{}, static_cast<u16>(pair >> 16));
        }
      }
    }
  });
}
