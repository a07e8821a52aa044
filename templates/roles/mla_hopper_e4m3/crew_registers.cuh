// How many registers a thread of each role has, of 128 at first. Needs ptx/setmaxnreg.cuh.

constexpr int kConsumerRegisters = kRows > 32 ? 184 : 152;
constexpr int kScorerRegisters = kRows > 32 ? 96 : 152;
constexpr int kProducerRegisters = 48;

__device__ inline void take_consumer_registers() { setmaxnreg_inc<kConsumerRegisters>(); }
__device__ inline void give_producer_registers_back() { setmaxnreg_dec<kProducerRegisters>(); }
__device__ inline void set_scorer_registers() {
  if constexpr (kScorerRegisters < 128) {
    setmaxnreg_dec<kScorerRegisters>();
  } else {
    setmaxnreg_inc<kScorerRegisters>();
  }
}
