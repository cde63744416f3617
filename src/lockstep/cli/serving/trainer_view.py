"""The trainer of a gateway process: its parts for the gateway, and its lines on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from lockstep.storage.api_keys import TINKER_PREFIX

if TYPE_CHECKING:
    from lockstep.gateway.app import Attachment
    from lockstep.gateway.options import GatewayOptions
    from lockstep.integrations.tinker.attached import AttachedTrainer


def attachment_of(trainer: AttachedTrainer) -> Attachment:
    """Return the trainer's routes and samplers, for the gateway."""
    from lockstep.gateway.app import Attachment
    from lockstep.integrations.tinker.downloads import SECRET_PATHS
    from lockstep.integrations.tinker.samplers import PREFIX

    return Attachment(trainer.routes, trainer.tenants.served_as, PREFIX, SECRET_PATHS)


def trainer_fields(trainer: AttachedTrainer) -> dict[str, Any]:
    """Return the trainer's fields in the ready line of JSON."""
    return {
        "model": trainer.tenants.base.names[0],
        "directory": str(trainer.tenants.base.directory),
        "state_dir": str(trainer.state_dir),
        "exact": not trainer.note,
        "note": trainer.note,
    }


def print_trainer(trainer: AttachedTrainer, url: str, options: GatewayOptions) -> None:
    """Print what a recipe needs, and how closely sampler and trainer agree."""
    out = Console(highlight=False)
    exact = "equal bit for bit" if not trainer.note else f"close, not equal ({trainer.note})"
    out.print(f"\nLogprobs of trainer and samplers: {exact}", soft_wrap=True)
    out.print(f"Training runs and checkpoints: {trainer.state_dir}", soft_wrap=True)
    key = _key_to_export(options)
    out.print(f"export TINKER_BASE_URL={url} TINKER_API_KEY={key}", soft_wrap=True, markup=False)
    directory = trainer.tenants.base.directory
    out.print(f"model_name in recipes: {directory}", soft_wrap=True, markup=False)


def _key_to_export(options: GatewayOptions) -> str:
    """Return a key that Tinker clients send and the gateway accepts; a description if there are
    several.
    """
    made = (
        f"a key that `lockstep keys add TENANT --prefix {TINKER_PREFIX} --key-file "
        f"{options.key_file}` made"
    )
    if options.api_keys:
        named = f"a key of LOCKSTEP_API_KEYS that begins with {TINKER_PREFIX}"
        return named if options.key_file is None else f"{named}, or {made}"
    return f"{TINKER_PREFIX}local" if options.key_file is None else made
