"""The OpenAPI document and its page, generated from the protocol types."""
