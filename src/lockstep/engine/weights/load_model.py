"""Loading of a transformers model from a checkpoint of any form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.manifest import GENERATION_CONFIG, Manifest
from lockstep.checkpoint.open import open_checkpoint
from lockstep.engine.weights.read import read_tensor


def load_model(directory: Path, dtype: torch.dtype) -> Any:
    """Return the causal LM in `directory`, also where its ranks wrote slices.

    Raises CheckpointError for a checkpoint that is incomplete or broken.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar per saved step would hide the run's own output
    manifest = Manifest.read(directory)
    if manifest is None or manifest.ranks is None:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    reader = open_checkpoint(directory)
    # Copies: training must not write into the memory of mapped files.
    tensors = {name: read_tensor(reader, name).clone() for name in reader.tensors}
    config = AutoConfig.from_pretrained(directory)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype
    )
    if (directory / GENERATION_CONFIG).exists():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model
