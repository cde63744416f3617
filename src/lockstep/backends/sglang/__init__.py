"""Driver of SGLang servers."""
