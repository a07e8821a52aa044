// Makes the rows that see what is not finite so, as they would be if it had been multiplied. Needs
// accumulators.cuh, roles/mla_hopper/finite_values.cuh.

__device__ inline void restore_nonfinite(const Params& params, const Item& item,
                                         Accumulators& accumulators) {
  add_nonfinite(params, item, [&](const unsigned char* token, int position) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      float4 value = accumulator(accumulators, i);
      const u16* elements = reinterpret_cast<const u16*>(token) + dim_of(fresh_warp(), i);
      const TaskRows rows = task_rows(i, fresh_warp());
      const bool sees_a = position < item.row_visible[rows.a];
      const bool sees_b = position < item.row_visible[rows.b];
      const float low = is_finite(elements[0]) ? 0.0f : cvt_f32(Element{}, elements[0]);
      const float high = is_finite(elements[8]) ? 0.0f : cvt_f32(Element{}, elements[8]);
      value.x += sees_a ? low : 0.0f;
      value.y += sees_b ? low : 0.0f;
      value.z += sees_a ? high : 0.0f;
      value.w += sees_b ? high : 0.0f;
      set_accumulator(accumulators, i, value);
    }
  });
}
