"""Read and write weights in the folder format of transformers, vLLM and llama.cpp."""
