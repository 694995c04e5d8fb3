"""The S3 server of the tests and the proxy before it: conditions, and each fault."""

from __future__ import annotations

import obstore
import pytest
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
)

from tests.support.object_store import FAULTS

BODY = bytes(range(256)) * 4096


@pytest.fixture
def store(bucket_url: str):
    """The server, without a proxy."""
    return obstore.store.from_url(bucket_url)


def names_in(store: obstore.store.ObjectStore) -> set[str]:
    return {entry["path"] for entry in store.list().collect()}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_of_one_request(store, proxy, bucket_url, name):
    """The client does not retry. What it is told, and what the server has."""
    # The environment names the proxy by now.
    through = obstore.store.from_url(bucket_url, retry_config={"max_retries": 0})
    store.put("old", BODY)
    is_put_done = name in ("lose_answer", "truncate_answer", "corrupt_answer", "repeat")
    proxy.inject(FAULTS[name], nth=2)

    assert bytes(through.get("old").bytes()) == BODY
    if name in ("corrupt_answer", "repeat"):
        read = bytes(through.get("old").bytes())
        assert (read == BODY) == (name == "repeat")
        assert len(read) == len(BODY)
    else:
        with pytest.raises(BaseError):
            through.get("old").bytes()
    assert bytes(through.get("old").bytes()) == BODY
    assert [request.is_faulty for request in proxy.requests] == [False, True, False]

    proxy.inject(FAULTS[name])
    if name == "corrupt_answer":
        through.put("new", BODY, mode="create")
    else:
        with pytest.raises(AlreadyExistsError if name == "repeat" else BaseError):
            through.put("new", BODY, mode="create")
    assert ("new" in names_in(store)) == is_put_done
    if is_put_done:
        assert bytes(store.get("new").bytes()) == BODY
