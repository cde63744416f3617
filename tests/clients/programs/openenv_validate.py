"""OpenEnv: what its check of an inference endpoint says before it trains on one."""

import dataclasses
import json
import sys

from openenv.core.harness.capture import validate_llm

base, model, *left_out = sys.argv[1:]
print(json.dumps(dataclasses.asdict(validate_llm(base, model, **dict.fromkeys(left_out, False)))))
