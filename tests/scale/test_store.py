"""What every store promises, on PostgreSQL; and its API keys, which files do not have."""

from __future__ import annotations

import pytest

from lockstep.storage import open_store
from lockstep.tokens.errors import BadRequest, NotFound
from tests.fleet.fakes import until
from tests.storage.claims import *  # noqa: F403


@pytest.fixture
def url(store_url: str) -> str:
    return store_url


async def test_keys_are_known_to_every_gateway_and_required_once_there_was_one(url: str) -> None:
    async with open_store(url) as store, open_store(url) as other:
        assert store.shared
        keys, elsewhere = store.keys, other.keys
        assert keys is not None
        assert elsewhere is not None
        await keys.follow()
        assert (keys.keys, keys.required) == ((), False)
        with pytest.raises(BadRequest, match="tenant is 'a b'"):
            await elsewhere.add("a b")
        stored, key = await elsewhere.add("alice", "tml-")
        assert key.startswith("tml-")
        assert key not in repr(stored)
        await until(lambda: keys.keys == (stored,))
        await elsewhere.revoke(stored.id)
        await until(lambda: keys.keys == ())
        assert keys.required
        with pytest.raises(NotFound, match=f"there is no key '{stored.id}' in the store"):
            await keys.revoke(stored.id)
