"""SGLang servers, from outside."""
