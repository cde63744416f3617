"""Starting and supervising processes: embedded workers, vLLM and SGLang servers, a Dynamo deployment."""
