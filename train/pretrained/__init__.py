"""Weights as others load them: folders of transformers, vLLM, llama.cpp."""
