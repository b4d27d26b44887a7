"""Text to tokens to rows to batches; never touches an accelerator."""
