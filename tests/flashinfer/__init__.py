"""FlashInfer's own attention tests, run on mlagen's entry points."""
