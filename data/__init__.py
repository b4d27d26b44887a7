"""Turn text into tokens, rows and batches, without using an accelerator."""
