"""Where models come from: folders, GGUF files, hf: and pypi: names."""
