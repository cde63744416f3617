"""Text in the engine: the bytes of tokens, and grammars over them."""
