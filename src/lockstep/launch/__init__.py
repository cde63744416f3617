"""Starting and supervising processes: embedded workers, vLLM servers, a Dynamo deployment."""
