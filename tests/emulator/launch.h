// Launches the kernel EMULATED, which precedes it.

static Params launched_params;  // aligned as they want to be

static void keep_params(const void* params) {
  memcpy(static_cast<void*>(&launched_params), params, sizeof launched_params);
  run_kernel = [] { EMULATED(launched_params); };
}

// Returns what is wrong, or an empty text.
CALLED_FROM_PYTHON const char* launch_emulated(const void* params, int blocks, int threads,
                                               int seed, char* stacks) {
  keep_params(params);
  return launch(blocks, threads, seed, stacks);
}
