"""GGUF files, llama.cpp's format of models: config, tokenizer and tensors of one file, under the names of the hub."""
