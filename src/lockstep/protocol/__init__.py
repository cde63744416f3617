"""Typed request and response bodies with strict decoding; one folder per dialect."""
