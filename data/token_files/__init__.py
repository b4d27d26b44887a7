"""Files of tokens that other trainers have written, read where they lie."""
