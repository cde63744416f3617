"""What the engine must know of text: the bytes of tokens, and grammars over them."""
