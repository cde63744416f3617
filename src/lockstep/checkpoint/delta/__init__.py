"""Lossless deltas: checkpoints that hold only what changed since another one, their base.

A delta is a directory beside its base. It has `delta.json` (see `record`), one safetensors file of
payloads (see `encoding`), and config, probe, manifest and STABLE like any checkpoint.
"""
