"""Starting and supervising processes: workers, vLLM and SGLang servers, a Dynamo deployment."""
