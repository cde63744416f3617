"""The control side of the server under question, whatever kind of URL was given for it."""

from __future__ import annotations

from lockstep.backends.admin import Admin
from lockstep.backends.dynamo.discovery import DynamoDiscovery
from lockstep.backends.registry import open_admin
from lockstep.tokens.errors import BadRequest, LockstepError, Unavailable


async def open_any_admin(url: str, token: str | None) -> Admin:
    """The driver for a worker's admin URL, or for the one worker behind a Dynamo discovery URL.

    Raises BadRequest when there are several workers: the kit changes one server at a time.
    """
    discovery = DynamoDiscovery(url, url=url)
    try:
        found = await discovery.find()
    except LockstepError:
        # Not Dynamo's discovery: a worker, or nothing, which the next error says better.
        return await open_admin(url, token)
    finally:
        await discovery.close()
    ready = [one for one in found if one.ready and one.admin_url]
    if not ready:
        raise Unavailable(f"{url} lists no worker with an admin URL")
    if len(ready) > 1:
        raise BadRequest(
            f"{url} lists {len(ready)} workers: requests are not pinned, so a row could not tell "
            "which one answered; check a deployment of one",
            param="admin",
        )
    return await open_admin(ready[0].admin_url or "", token, "dynamo", routes=ready[0].routes)
