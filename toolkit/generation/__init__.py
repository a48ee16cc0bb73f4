"""Text generation: filters of the next token's distribution, rows with their cache, the decoding loop, beam search, texts."""
