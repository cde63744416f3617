"""What ranks need, imported by the server that they are forks of (`tests.ranks`)."""

import torch.distributed.fsdp  # noqa: F401
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

import lockstep.engine.sharded
import lockstep.train.learning.learner  # noqa: F401
