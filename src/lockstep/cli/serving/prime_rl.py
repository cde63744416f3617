"""The lines of prime-rl's configuration that make it train on a gateway."""

from __future__ import annotations

import json
import shlex

from lockstep.running_gateways import RunningGateway

KEY_VAR = "VLLM_API_KEY"


def prime_rl_toml(gateway: RunningGateway, roots: tuple[str, ...]) -> str:
    """Return the part of prime-rl's rl.toml that names this gateway; weights may be in `roots`."""
    places = " or ".join(roots) or "a directory that --checkpoint-root names"
    return "\n".join(
        (
            "# prime-rl: rl.toml, without an [inference] table; Lockstep is the inference.",
            f"# output_dir must be in {places}: weights are loaded from output_dir/broadcasts.",
            "[model]",
            f"name = {json.dumps(gateway.model)}",
            "",
            "[weight_broadcast]",
            'type = "filesystem"',
            "",
            "[orchestrator.model.client]",
            f"base_url = {json.dumps(gateway.url + '/v1')}",
            f"admin_base_url = [{json.dumps(gateway.admin_url + '/v1/rl')}]",
            f"api_key_var = {json.dumps(KEY_VAR)}",
        )
    )


def prime_rl_key(gateway: RunningGateway, *, keys: bool) -> str:
    """Return the command that gives prime-rl its only key, and what the data port needs for it."""
    if gateway.token_file is None:
        command = f'export {KEY_VAR}="$LOCKSTEP_ADMIN_TOKEN"'
    else:
        command = f'export {KEY_VAR}="$(cat {shlex.quote(gateway.token_file)})"'
    if not keys:
        return command
    note = "# prime-rl has one key: the admin token must be an API key of the data port as well."
    return f"{note}\n{command}"
